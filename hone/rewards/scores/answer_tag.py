"""Extracts the text between `<answer>` and `</answer>`, in linear time for any text."""

from __future__ import annotations

_OPEN, _CLOSE = "<answer>", "</answer>"


def last_answer(text: str) -> str | None:
    """Returns the content of the last closed `<answer>…</answer>` (it may span lines), or None."""
    start = text.rfind(_OPEN, 0, max(0, text.rfind(_CLOSE)))
    if start < 0:
        return None
    # A closing tag that nothing opened may follow the answer.
    return text[start + len(_OPEN) : text.index(_CLOSE, start)].strip()


def all_answers(text: str) -> list[str]:
    """Returns every answer from left to right, each from an opening tag to the next closing tag."""
    answers = []
    start = text.find(_OPEN)
    while start >= 0:
        end = text.find(_CLOSE, start)
        if end < 0:
            break
        answers.append(text[start + len(_OPEN) : end].strip())
        start = text.find(_OPEN, end)
    return answers
