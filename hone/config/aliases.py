"""Keys that users' documents and older trees write, under the names that they have here.

Renamed keys and rewritten values are rows of `other_keys.txt`; here are the keys whose new value must be
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

from hone.config.errors import nearest
from hone.config.reward import RewardKwargs
from hone.config.sources import Setting
from hone.config.states import Rule, is_one_of, names, new_name, rules, scalars
from hone.types import JsonObject, JsonValue

Given = Mapping[str, JsonValue]
"""The last value of every key that was set."""


class BadAliasValue(ValueError):
    """The value of an old key cannot be said in the new one; the text says what it takes."""


def _searches(key: str, value: JsonValue, given: Given) -> JsonObject:
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadAliasValue("takes an integer")
    return {"actor_rollout_ref.rollout.multi_turn.max_assistant_turns": value + 1}


def _least_rate(key: str, value: JsonValue, given: Given) -> JsonObject:
    block = key.rpartition(".")[0]
    peak = given.get(f"{block}.lr")
    if not (isinstance(value, float) and isinstance(peak, float) and peak > 0):
        return {key: value}
    return {f"{block}.min_lr_ratio": value / peak} if value else {}


def _lower_bound(key: str, low: JsonValue, given: Given) -> JsonObject:
    """Both bounds of verl 0.6's rejection as one `lower_upper`; each is the other's inverse by default."""
    upper = key.removesuffix("_lower")
    if not isinstance(low, float | int) or not low:
        return {}
    high = given.get(upper)
    return {upper: f"{low:g}_{high if isinstance(high, float | int) else 1 / low:g}"}


def _manager_extras(key: str, value: JsonValue, given: Given) -> JsonObject:
    """A key that the managers' settings do not know goes to a manager of the user's own."""
    block, known = "reward_model.reward_kwargs", {field.name for field in fields(RewardKwargs)}
    rest = key.removeprefix(block + ".")
    name = rest.split(".")[0]
    if rest == key or name in known or nearest(name, known):
        return {key: value}
    return {f"{block}.extra.{rest}": value}


COMPUTED: dict[str, tuple[Callable[[str, JsonValue, Given], JsonObject], str]] = {
    "max_turns": (
        _searches,
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns, one more: so many searches, then "
        "the answer",
    ),
    "!algorithm.rollout_correction.rollout_rs_threshold_lower": (
        _lower_bound,
        "the lower bound of algorithm.rollout_correction.rollout_rs_threshold, as lower_upper",
    ),
    "**.optim.min_lr": (_least_rate, "optim.min_lr_ratio, as a share of optim.lr"),
    "**.optim.lr_min": (_least_rate, "optim.min_lr_ratio, as a share of optim.lr"),
    "reward_model.reward_kwargs.**": (
        _manager_extras,
        "reward_model.reward_kwargs.extra.**, where the managers have no such key",
    ),
}
"""Keys whose value is computed, and what they mean; a pattern that begins with `**` counts in every tree.
A `!` marks a key that wins over what is written later, here and in the table."""


def _moved(setting: Setting, key: str, value: JsonValue) -> Setting:
    """The setting under another name, which its origin tells."""
    if key == setting.key:
        return replace(setting, value=value)
    return replace(setting, key=key, value=value, origin=f"{setting.origin}, written {setting.key}")


def translate(settings: Sequence[Setting], problems: list[str], tree: str) -> list[Setting]:
    """The settings under the names that keys have in a tree."""
    renamed = [_moved(s, new_name(s.key, tree), s.value) for s in settings]
    given = {s.key: s.value for s in renamed}
    result: list[Setting] = []
    outranking: list[Setting] = []
    for setting in renamed:
        try:
            pattern, new = _new_settings(setting.key, setting.value, given, tree)
        except BadAliasValue as error:
            problems.append(f"{setting.key}={setting.value} {error} ({setting.origin})")
            continue
        moved = [_moved(setting, key, value) for key, value in new.items()]
        (outranking if pattern.startswith("!") else result).extend(moved)
    return [*result, *outranking]


def _new_settings(key: str, value: JsonValue, given: Given, tree: str) -> tuple[str, JsonObject]:
    """The pattern that names a key, and the settings in its place."""
    for pattern, (compute, _) in COMPUTED.items():
        if (tree == "ppo_trainer" or pattern[0] == "*") and names(pattern.lstrip("!"), key):
            return pattern, compute(key, value, given)
    rows = [rule for rule in rules("rewritten", tree=tree) if rule.pattern.lstrip("!") == key]
    for rule in rows:
        if rule.has(value) and all(_holds(term, given) for term in rule.where.split(" and ")):
            return rule.pattern, {k: value if v == "*" else v for k, v in rule.settings.items()}
    if rows and value not in (None, False):
        raise BadAliasValue("takes true or false")
    return "", {} if rows else {key: value}


def _holds(term: str, given: Given) -> bool:
    """Whether a condition of a row holds: `key` was set, `!key` was not, `key=value`, `key!=value`."""
    key, equals, text = term.partition("=")
    if not equals:
        return not term or (term.strip("!") in given) != term.startswith("!")
    return is_one_of(given.get(key.rstrip("!")), scalars(text)) != key.endswith("!")


def other_names(tree: str) -> dict[str, str]:
    """Every other name of a tree's keys, with what it comes to."""
    meanings = {rule.pattern: rule.becomes for rule in rules("renamed", tree=tree)}
    rows: dict[str, list[Rule]] = {}
    for rule in rules("rewritten", tree=tree):
        if rule.becomes != f"{(old := rule.pattern.lstrip('!'))}=*":
            rows.setdefault(old, []).append(rule)
    meanings |= {old: "; ".join(map(str, inside)) for old, inside in rows.items()}
    computed = {pattern.lstrip("!"): meaning for pattern, (_, meaning) in COMPUTED.items()}
    return meanings | (computed if tree == "ppo_trainer" else {})
