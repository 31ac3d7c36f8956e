"""The errors of a configuration, and suggestions of similar names.

A message states the key, its value, the origin of the value, and a value that works.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class ConfigError(ValueError):
    """A configuration that cannot run; `problems` holds one sentence per problem."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        lines = [f"{len(self.problems)} problems", *(f"- {problem}" for problem in self.problems)]
        super().__init__(self.problems[0] if len(self.problems) == 1 else "\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)


def nearest(word: str, candidates: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the candidate most similar to `word`, or None."""
    return next(iter(difflib.get_close_matches(word, list(candidates), 1, cutoff)), None)


def did_you_mean(*suggestions: str | None) -> str:
    """Returns ` Did you mean 'x' or 'y'?`, or an empty string."""
    words = " or ".join(f"'{word}'" for word in suggestions if word)
    return f" Did you mean {words}?" if words else ""


def unknown_argument(function_name: str, name: str, known_names: Sequence[str]) -> TypeError:
    """Returns the error of an unknown keyword argument; the message suggests the closest known argument."""
    return TypeError(
        f"{function_name} takes no argument {name!r}.{did_you_mean(nearest(name, known_names))} "
        f"It takes {', '.join(known_names)}"
    )
