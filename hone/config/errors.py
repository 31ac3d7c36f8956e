"""The errors of a configuration: a message states the key, its value, the origin of the value, and a value
that works."""

from __future__ import annotations

from collections.abc import Sequence

from hone.errors import UserError
from hone.suggestions import suggestion


class ConfigError(UserError, ValueError):
    """A configuration that cannot run; `problems` holds one sentence per problem."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        lines = [f"{len(self.problems)} problems", *(f"- {problem}" for problem in self.problems)]
        super().__init__(self.problems[0] if len(self.problems) == 1 else "\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[str]]]:
        return type(self), (self.problems,)


def unknown_argument(function_name: str, name: str, known_names: Sequence[str]) -> TypeError:
    """Returns the error of an unknown keyword argument; the message suggests the closest known argument."""
    return TypeError(
        f"{function_name} takes no argument {name!r}.{suggestion(name, known_names)} "
        f"It takes {', '.join(known_names)}"
    )
