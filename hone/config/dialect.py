"""The seam between `compose` and commands of another framework: a program gives `compose` a dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hone.config.conditions import is_one_of
from hone.config.convert import show_value
from hone.config.sources import Setting
from hone.types import JsonObject, JsonValue

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


@dataclass(frozen=True)
class Rule:
    """A rule for the keys that a pattern matches: `*` is one name, `**` any number of names."""

    state: str
    pattern: str
    tree: str
    """The tree of the keys; `*` is every tree."""
    values: tuple[JsonValue, ...] = ()
    """Values that the row applies to; for a neutral or refused key, the values that need no message."""
    becomes: str = ""
    """The replacement: a value, settings or a key."""
    why: str = ""
    where: str = ""
    """The condition on other keys."""

    def matches(self, value: JsonValue) -> bool:
        """Returns whether the row applies to a value; words such as "off" and "any" match many."""
        return is_one_of(value, self.values)

    def __str__(self) -> str:
        where = f" where {self.where}" if self.where else ""
        return f"{', '.join(map(show_value, self.values))}{where} is {self.becomes or 'without effect'}"


class Dialect:
    """The meaning of another framework's commands in hone's keys; this class knows hone's own keys only."""

    configs: Mapping[str, tuple[str, JsonObject]] = {}
    """The tree of hone and the settings of each further built-in config, by name."""
    groups: Mapping[str, Sequence[str]] = {}
    """The options of Hydra groups, by group."""
    defaults_lists: Mapping[str, Mapping[str, str]] = {}
    """The options by group in the defaults list of a built-in config, by tree."""
    files_without_tree: Sequence[str] = ()
    """Names in defaults lists that set nothing."""

    def read(
        self, settings: Sequence[Setting], tree: str, *, has_starting_values: bool = False
    ) -> Reading:
        """Returns the meaning of a command's settings. `has_starting_values` is true for a program of hone
        that chooses values for the model and the data."""
        return Reading(list(settings))

    def translate(
        self, settings: Sequence[Setting], problems: list[str], tree: str
    ) -> list[Setting]:
        """Returns the settings under the key names of a tree; adds invalid values to `problems`."""
        return list(settings)

    def new_name(self, key: str, tree: str) -> str:
        """Returns the name of a key in a tree."""
        return key

    def other_names(self, tree: str) -> dict[str, str]:
        """Returns the other names of a tree's keys, each with the key or settings that it means."""
        return {}

    def rule_of(self, key: str, tree: str) -> Rule | None:
        """Returns the rule about a key without a field, or None."""
        return None

    def rules(self) -> Sequence[Rule]:
        """Returns the rules about keys without a field, refused ones first."""
        return ()

    def replacements(self, key: str | None = None) -> Sequence[Rule]:
        """Returns the rules that replace values, of one key or of all keys."""
        return ()

    def applies(self, rule: Rule, key: str) -> bool:
        """Returns whether a rule is about a key."""
        return rule.pattern == key


OWN_KEYS = Dialect()
