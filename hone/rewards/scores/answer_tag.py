"""The text between `<answer>` and `</answer>`, which several sources share.

Takes the last closed pair. Nothing is removed from inside but surrounding white space.
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
