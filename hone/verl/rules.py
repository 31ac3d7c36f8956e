"""Handles keys and values of verl that have no field in our schema; `rules.txt` lists them.

A key is refused, neutral (without effect; a value that requests another behaviour prints a note),
rewritten or renamed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

from hone.config.conditions import ABSENT, condition_holds
from hone.config.convert import parse_pairs, parse_scalars, read_rules
from hone.config.dialect import Rule
from hone.config.keys import leaves
from hone.config.reward import RewardKwargs
from hone.config.sources import Setting
from hone.config.trees import TREES
from hone.suggestions import nearest
from hone.types import JsonObject, JsonValue

_CELLS = {
    **dict.fromkeys(("refused", "neutral"), ("values", "why")),
    "replaced_values": ("values", "becomes", "why"),
    "rewritten": ("values", "where", "becomes"),
    "renamed": ("becomes",),
}
"""The fields of `Rule` that the cells after the patterns fill, by section."""


@functools.cache
def rules(*states: str, tree: str = "") -> tuple[Rule, ...]:
    """Returns the rows of some sections, one per pattern, for one tree or for all trees."""
    rows: list[Rule] = []
    for state in states:
        default_tree = "ppo_trainer" if state in ("rewritten", "renamed") else "*"
        for patterns, *texts in read_rules(__package__)[state]:
            cells = dict(zip(_CELLS[state], texts, strict=True))
            values = parse_scalars(cells.pop("values", ""))
            for word in patterns.split():
                row_tree, _, pattern = word.rpartition(":")
                rows.append(Rule(state, pattern, row_tree or default_tree, values, **cells))
    return tuple(rule for rule in rows if not tree or rule.tree in ("*", tree))


@functools.cache
def _compile_pattern(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern).replace(r"\*", "*")
    # A leading `**` also matches keys at the root; a trailing one also matches the block itself.
    text = re.sub(r"^\*\*\\\.", r"(?:(.+)\\.)?", text)
    text = re.sub(r"\\\.\*\*$", r"(?:\\.(.+))?", text)
    return re.compile(text.replace("*", "[^.]*"))


def matches_pattern(pattern: str, key: str) -> bool:
    return _compile_pattern(pattern).fullmatch(key) is not None


@functools.cache
def new_name(key: str, tree: str) -> str:
    """Returns the new name of a key in a tree; the part that `**` matches stays, and a renamed block may
    contain a renamed key."""
    for rule in rules("renamed", tree=tree):
        if match := _compile_pattern(rule.pattern).fullmatch(key):
            parts = [(match[1] or "") if part == "**" else part for part in rule.becomes.split(".")]
            return new_name(".".join(part for part in parts if part), tree)
    return key


@functools.cache
def rules_of(key: str, *states: str, tree: str = "") -> list[Rule]:
    """Returns the rows of some sections that apply to a key."""
    return [rule for rule in rules(*states, tree=tree) if matches_pattern(rule.pattern, key)]


def rule_of(key: str, tree: str) -> Rule | None:
    """Returns the row that applies to a key without a field, or None."""
    return next(iter(rules_of(key, "refused", "neutral", tree=tree)), None)


Values = Mapping[str, JsonValue]
"""The last value of every key that was set."""

# docs/config.md prints the docstrings of the next three functions.


def _min_lr_ratio(key: str, value: JsonValue, values: Values) -> JsonObject:
    """optim.min_lr_ratio, as a share of optim.lr"""
    block = key.rpartition(".")[0]
    peak = values.get(f"{block}.lr")
    if not (isinstance(value, float) and isinstance(peak, float) and peak > 0):
        return {key: value}
    return {f"{block}.min_lr_ratio": value / peak} if value else {}


def _lower_bound(key: str, low: JsonValue, values: Values) -> JsonObject:
    """the lower bound of algorithm.rollout_correction.rollout_rs_threshold, as lower_upper"""
    upper = key.removesuffix("_lower")
    if not isinstance(low, float | int) or not low:
        return {}
    high = values.get(upper)  # by default the inverse of the lower bound
    return {upper: f"{low:g}_{high if isinstance(high, float | int) else 1 / low:g}"}


def _manager_extras(key: str, value: JsonValue, values: Values) -> JsonObject:
    """reward_model.reward_kwargs.extra.**, where the managers have no such key"""
    block, keys = "reward_model.reward_kwargs", {field.name for field in fields(RewardKwargs)}
    inner_key = key.removeprefix(block + ".")
    name = inner_key.split(".")[0]
    if inner_key == key or name in keys or nearest(name, keys):
        return {key: value}
    return {f"{block}.extra.{inner_key}": value}


COMPUTED: dict[str, Callable[[str, JsonValue, Values], JsonObject]] = {
    "!algorithm.rollout_correction.rollout_rs_threshold_lower": _lower_bound,
    **dict.fromkeys(("**.optim.min_lr", "**.optim.lr_min"), _min_lr_ratio),
    "reward_model.reward_kwargs.**": _manager_extras,
}
"""Computes the settings that replace a key: one function per pattern. A pattern that begins with `**` applies
to every tree. `!`, here and in `rules.txt`, marks a key that also overrides settings written after it."""


def _rename_setting(setting: Setting, key: str, value: JsonValue) -> Setting:
    """Returns a setting with a new key and value; its origin names the old key."""
    if key == setting.key:
        return replace(setting, value=value)
    return replace(setting, key=key, value=value, origin=f"{setting.origin}, written {setting.key}")


def translate(settings: Sequence[Setting], problems: list[str], tree: str) -> list[Setting]:
    """Returns the settings under the key names of a tree; adds invalid values of old keys to `problems`."""
    renamed = [_rename_setting(s, new_name(s.key, tree), s.value) for s in settings]
    values = {s.key: s.value for s in renamed}
    translated: list[Setting] = []
    overriding_settings: list[Setting] = []
    for setting in renamed:
        try:
            pattern, new_values = _new_values(setting.key, setting.value, values, tree)
        except ValueError as error:
            problems.append(f"{setting.key}={setting.value} {error} ({setting.origin})")
            continue
        new_settings = [_rename_setting(setting, key, value) for key, value in new_values.items()]
        (overriding_settings if pattern.startswith("!") else translated).extend(new_settings)
    return [*translated, *overriding_settings]


def _new_values(key: str, value: JsonValue, values: Values, tree: str) -> tuple[str, JsonObject]:
    """Returns the pattern that matches a key (or ""), and the values by key that replace its value; raises
    ValueError for a value that no row of `rules.txt` rewrites."""
    for pattern, compute in COMPUTED.items():
        applies_to_tree = tree == "ppo_trainer" or pattern[0] == "*"
        if applies_to_tree and matches_pattern(pattern.lstrip("!"), key):
            return pattern, compute(key, value, values)
    rows = [rule for rule in rules("rewritten", tree=tree) if rule.pattern.lstrip("!") == key]
    for rule in (row for row in rows if row.matches(value)):
        if condition_holds(rule.where, lambda name: values.get(name, ABSENT)):
            new_values = parse_pairs(rule.becomes)
            replacements = {"*": value, "*+1": value + 1 if isinstance(value, int) else value}
            for new_key, text in new_values.items():
                new_values[new_key] = replacements.get(str(text), text)
            return rule.pattern, new_values
    if not rows or key in leaves(TREES[tree].root):
        return "", {key: value}
    if value is not None and value is not False:
        takes_count = str(rows[0].values[0]).startswith("count")
        raise ValueError("takes an integer" if takes_count else "takes true or false")
    return "", {}


def other_names(tree: str) -> dict[str, str]:
    """Returns the other names of a tree's keys, each with the key or settings that it means."""
    meanings = {rule.pattern: [rule.becomes] for rule in rules("renamed", tree=tree)}
    for rule in rules("rewritten", tree=tree):
        old_key = rule.pattern.lstrip("!")
        if rule.becomes != f"{old_key}=*":
            meanings.setdefault(old_key, []).append(str(rule))
    if tree == "ppo_trainer":
        meanings |= {key.lstrip("!"): [str(compute.__doc__)] for key, compute in COMPUTED.items()}
    return {old_name: "; ".join(texts) for old_name, texts in meanings.items()}
