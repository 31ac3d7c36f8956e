"""The one error of the config room, and the proposals in its messages.

A message says what was set, what came, where it came from, and what would work.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """A configuration that cannot run. `problems` holds one sentence for each defect."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        lines = [f"{len(self.problems)} problems", *(f"- {problem}" for problem in self.problems)]
        super().__init__(self.problems[0] if len(self.problems) == 1 else "\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate most like `word`, or None."""
    return next(iter(difflib.get_close_matches(word, list(candidates), 1, cutoff)), None)


def did_you_mean(*suggestions: str | None) -> str:
    """` Did you mean 'x' or 'y'?`, or nothing."""
    words = " or ".join(f"'{word}'" for word in suggestions if word)
    return f" Did you mean {words}?" if words else ""
