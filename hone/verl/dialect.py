"""The dialect that hone's programs give to `compose`: commands of verl and of the trees made from it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from hone import config
from hone.config.convert import parse_pairs, read_rules
from hone.config.dialect import Dialect, Reading, Rule
from hone.config.sources import Setting
from hone.verl import rules
from hone.verl.trees import read_tree

_RULES = read_rules(__package__)


class VerlDialect(Dialect):
    """The commands of verl, TinyZero, Search-R1 and PURE."""

    configs = {  # noqa: RUF012
        name: (tree, parse_pairs(settings))
        for names, tree, settings in _RULES["configs"]
        for name in names.split()
    }
    groups = {group: options.split() for group, options in _RULES["groups"]}  # noqa: RUF012
    defaults_lists = {  # noqa: RUF012
        tree: {group: str(option) for group, option in parse_pairs(options).items()}
        for tree, options in _RULES["defaults"]
    }
    files_without_tree = ("reward_manager", "legacy_reward_impl")

    def read(
        self, settings: Sequence[Setting], tree: str, *, has_starting_values: bool = False
    ) -> Reading:
        return read_tree(settings, tree, has_starting_values=has_starting_values)

    def translate(
        self, settings: Sequence[Setting], problems: list[str], tree: str
    ) -> list[Setting]:
        return rules.translate(settings, problems, tree)

    def new_name(self, key: str, tree: str) -> str:
        return rules.new_name(key, tree)

    def other_names(self, tree: str) -> dict[str, str]:
        return rules.other_names(tree)

    def rule_of(self, key: str, tree: str) -> Rule | None:
        return rules.rule_of(key, tree)

    def rules(self) -> Sequence[Rule]:
        return rules.rules("refused", "neutral")

    def replacements(self, key: str | None = None) -> Sequence[Rule]:
        if key is None:
            return rules.rules("replaced_values")
        return rules.rules_of(key, "replaced_values")

    def applies(self, rule: Rule, key: str) -> bool:
        return rules.matches_pattern(rule.pattern, key)


class VerlKeys(VerlDialect):
    """verl's keys in today's meaning, for Python code that composes a config."""

    def read(
        self, settings: Sequence[Setting], tree: str, *, has_starting_values: bool = False
    ) -> Reading:
        return Reading(list(settings))


VERL, VERL_KEYS = VerlDialect(), VerlKeys()

compose = functools.partial(config.compose, dialect=VERL_KEYS)
load_config = functools.partial(config.load_config, dialect=VERL_KEYS)
