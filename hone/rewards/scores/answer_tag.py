"""The text between `<answer>` and `</answer>`, which several sources share.

Nothing is removed from inside but surrounding white space. Searching is linear in the text, also
for text that is made of tags.
"""

from __future__ import annotations

_OPEN, _CLOSE = "<answer>", "</answer>"


def last_answer(text: str) -> str | None:
    """Content of the last `<answer>…</answer>` (it may span lines), or None when none is closed."""
    end = text.rfind(_CLOSE)
    if end < 0:
        return None
    start = text.rfind(_OPEN, 0, end)
    return text[start + len(_OPEN) : end].strip() if start >= 0 else None


def all_answers(text: str) -> list[str]:
    """Every answer from left to right: each runs from an opening tag to the next closing one."""
    answers = []
    start = text.find(_OPEN)
    while start >= 0:
        end = text.find(_CLOSE, start)
        if end < 0:
            break
        answers.append(text[start + len(_OPEN) : end].strip())
        start = text.find(_OPEN, end)
    return answers
