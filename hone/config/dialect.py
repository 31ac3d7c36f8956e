"""The seam between `compose` and commands of another framework: a program gives `compose` a dialect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hone.config.sources import Setting

DEFAULT_OF = "default of "
"""The start of the origin of a value that is the default of a command's tree."""


@dataclass(frozen=True)
class Reading:
    """What a dialect makes of the settings of a command."""

    settings: list[Setting]
    """The settings of the user, without the keys of the dialect itself."""
    defaults: list[Setting] = field(default_factory=list)
    """Defaults that differ from the schema's; every setting of the user overrides them."""
    line: str = ""
    """The line at the start of a run that names the tree of the command."""
    problems: list[str] = field(default_factory=list)


class Dialect:
    """The meaning of another framework's commands in hone's keys; this class knows hone's own keys only."""

    def read(
        self, settings: Sequence[Setting], tree: str, *, has_starting_values: bool = False
    ) -> Reading:
        """Returns the meaning of a command's settings. `has_starting_values` is true for a program of hone
        that chooses values for the model and the data."""
        return Reading(list(settings))


OWN_KEYS = Dialect()
