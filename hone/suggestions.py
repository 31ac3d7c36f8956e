"""Suggestions of known names for an unknown name, as the end of an error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known_names: Iterable[str], min_similarity: float = 0.6) -> str | None:
    """Returns the known name most similar to `name`, or None; a similarity of 1 means equal names."""
    matches = difflib.get_close_matches(name, list(known_names), 1, min_similarity)
    return matches[0] if matches else None


def did_you_mean(*names: str | None) -> str:
    """Returns ` Did you mean 'x' or 'y'?`, or an empty string without names."""
    choices = " or ".join(f"'{name}'" for name in names if name)
    return f" Did you mean {choices}?" if choices else ""


def suggestion(name: str, known_names: Iterable[str]) -> str:
    """Returns ` Did you mean 'x'?` if a known name is similar, else an empty string."""
    return did_you_mean(nearest(name, known_names))
