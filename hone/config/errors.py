"""The one error of the config room, and the words its messages are made of.

A message says what was set, what came, where it came from, and what would work.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """A configuration that cannot run. `problems` holds one sentence for each defect."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        if len(self.problems) == 1:
            text = self.problems[0]
        else:
            text = "\n".join([f"{len(self.problems)} problems"] + [f"- {p}" for p in self.problems])
        super().__init__(text)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate most like `word`, or None."""
    found = difflib.get_close_matches(word, list(candidates), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(suggestion: str | None) -> str:
    """` Did you mean 'x'?`, or nothing."""
    return f" Did you mean '{suggestion}'?" if suggestion else ""
