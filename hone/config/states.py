"""Keys and values of verl that have no field of their own here: one data table, `other_keys.txt`.

A key of the table is refused, neutral (it runs; a value that asks for something else is noted at start),
rewritten or renamed; some are computed here. A key in none of them is a field, and works. To make a key
work, delete its row and write the field.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib.resources import files

from hone.config.convert import Value, same, show_value
from hone.config.errors import nearest
from hone.config.reward import RewardKwargs
from hone.config.sources import Setting
from hone.types import JsonObject, JsonValue

OFF = (None, False, 0, -1, "", "none", "None", "disabled", "???")
ABSENT = object()
"""What a condition reads of a key that was not set."""
_WORDS = {"true": True, "false": False, "null": None}
_TERM = re.compile(r"(!?)([\w.]+)(?:(!=|<=|=|>)(.+))?")
_CELLS = {
    **dict.fromkeys(("refused", "neutral"), ("values", "why")),
    "values": ("values", "becomes", "why"),
    "rewritten": ("values", "where", "becomes"),
    "renamed": ("becomes",),
}
"""What the cells of a section's rows are, after the patterns."""


@dataclass(frozen=True)
class Rule:
    """What a row says of the keys that a pattern names: `*` is one name, `**` any number of them."""

    state: str
    pattern: str
    tree: str
    """The tree whose keys these are; `*` is every tree."""
    values: tuple[JsonValue, ...] = ()
    """Values that the row is about; of a neutral or refused key those that need no word."""
    becomes: str = ""
    """The value, settings or key in its place."""
    why: str = ""
    where: str = ""
    """What else must have been set."""

    def has(self, value: JsonValue) -> bool:
        """Whether the row names a value; "off", "number", "count" and "any" stand for many."""
        return is_one_of(value, self.values)

    @property
    def usual(self) -> JsonValue:
        """What a reference to a key that was not written comes to."""
        return next((v for v in self.values if v not in ("off", "any")), None)

    @property
    def settings(self) -> dict[str, JsonValue]:
        """Settings that stand for the key; `*` is the value that was written."""
        pairs = (word.split("=") for word in self.becomes.split())
        return {key: scalar(value) for key, value in pairs}

    def __str__(self) -> str:
        where = f" where {self.where}" if self.where else ""
        return f"{', '.join(map(show_value, self.values))}{where} is {self.becomes or 'without effect'}"


def is_off(value: JsonValue) -> bool:
    """Whether a value says that a thing is not wanted."""
    if isinstance(value, Mapping | list | tuple):
        return all(is_off(v) for v in (value.values() if isinstance(value, Mapping) else value))
    return any(same(value, off) for off in OFF)


def is_one_of(value: JsonValue, words: tuple[JsonValue, ...]) -> bool:
    """Whether words of a table name a value."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    count = type(value) is int and value >= 1
    many = {"any": True, "off": is_off(value), "number": number, "count": count}
    return any(many.get(str(word)) or same(value, word) for word in words)


def scalar(text: str) -> JsonValue:
    """A value as the tables write it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return list(scalars(text[1:-1])) if text.startswith("[") else _WORDS.get(text, text)


def scalars(text: str) -> tuple[JsonValue, ...]:
    """Values between commas."""
    return tuple(scalar(word.strip()) for word in text.split(",") if word.strip())


@functools.cache
def read_table(file: str) -> dict[str, list[list[str]]]:
    """Cells of every row of a table, by section."""
    sections: dict[str, list[list[str]]] = {}
    for line in files("hone.config").joinpath(file).read_text("utf-8").splitlines():
        if line.startswith("["):
            rows = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            rows.append([cell.strip() for cell in re.split(r" \|(?= |$)", line)])
    return sections


@functools.cache
def rules(*states: str, tree: str = "") -> tuple[Rule, ...]:
    """The rows of some sections, one per pattern, of a tree or of all."""
    table: list[Rule] = []
    for state in states:
        everywhere = "ppo_trainer" if state in ("rewritten", "renamed") else "*"
        for patterns, *texts in read_table("other_keys.txt")[state]:
            cells = dict(zip(_CELLS[state], texts, strict=True))
            values = scalars(cells.pop("values", ""))
            for word in patterns.split():
                owner, _, pattern = word.rpartition(":")
                table.append(Rule(state, pattern, owner or everywhere, values, **cells))
    return tuple(rule for rule in table if not tree or rule.tree in ("*", tree))


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    text = re.escape(pattern).replace(r"\*", "*")
    # `**` at the front also names keys at the root; at the end also the block itself.
    text = re.sub(r"^\*\*\\\.", r"(?:(.+)\\.)?", text)
    text = re.sub(r"\\\.\*\*$", r"(?:\\.(.+))?", text)
    return re.compile(text.replace("*", "[^.]*"))


def names(pattern: str, key: str) -> bool:
    """Whether a pattern names a key."""
    return _compiled(pattern).fullmatch(key) is not None


@functools.cache
def new_name(key: str, tree: str) -> str:
    """The name of a key in a tree; what `**` stands for stays, and a renamed block may hold a renamed
    key."""
    for rule in rules("renamed", tree=tree):
        if match := _compiled(rule.pattern).fullmatch(key):
            parts = [(match[1] or "") if part == "**" else part for part in rule.becomes.split(".")]
            return new_name(".".join(part for part in parts if part), tree)
    return key


@functools.cache
def rule_of(key: str, tree: str) -> Rule | None:
    """The row that decides about a key without a field; None where no row names it."""
    return next((r for r in rules("refused", "neutral", tree=tree) if names(r.pattern, key)), None)


@functools.cache
def replacements_of(key: str) -> list[Rule]:
    """The values of a key that stand for others."""
    return [rule for rule in rules("values") if names(rule.pattern, key)]


def topics(answers: Iterable[tuple[str, str]], one: str = "", many: str = "") -> list[str]:
    """One line per sentence: the first keys that it answers, and how many more there are."""
    shown = 3
    by_sentence: dict[str, list[str]] = {}
    for written, sentence in answers:
        by_sentence.setdefault(sentence, []).append(written)
    lines = []
    for sentence, keys in by_sentence.items():
        more = f" and {len(keys) - shown} more" if len(keys) > shown else ""
        verb = one if len(keys) == 1 else many
        lines.append(f"{', '.join(keys[:shown])}{more}{verb}: {sentence}")
    return lines


Values = Mapping[str, JsonValue]
"""The last value of every key that was set."""


def _least_rate(key: str, value: JsonValue, values: Values) -> JsonObject:
    block = key.rpartition(".")[0]
    peak = values.get(f"{block}.lr")
    if not (isinstance(value, float) and isinstance(peak, float) and peak > 0):
        return {key: value}
    return {f"{block}.min_lr_ratio": value / peak} if value else {}


def _lower_bound(key: str, low: JsonValue, values: Values) -> JsonObject:
    """Both bounds of verl 0.6's rejection as one `lower_upper`; each is the other's inverse by default."""
    upper = key.removesuffix("_lower")
    if not isinstance(low, float | int) or not low:
        return {}
    high = values.get(upper)
    return {upper: f"{low:g}_{high if isinstance(high, float | int) else 1 / low:g}"}


def _manager_extras(key: str, value: JsonValue, values: Values) -> JsonObject:
    """A key that the managers' settings do not know goes to a manager of the user's own."""
    block, keys = "reward_model.reward_kwargs", {field.name for field in fields(RewardKwargs)}
    rest = key.removeprefix(block + ".")
    name = rest.split(".")[0]
    if rest == key or name in keys or nearest(name, keys):
        return {key: value}
    return {f"{block}.extra.{rest}": value}


COMPUTED: dict[str, tuple[Callable[[str, JsonValue, Values], JsonObject], str]] = {
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
    values = {s.key: s.value for s in renamed}
    result: list[Setting] = []
    outranking: list[Setting] = []
    for setting in renamed:
        pattern, new = _new_settings(setting.key, setting.value, values, tree)
        if isinstance(new, str):
            problems.append(f"{setting.key}={setting.value} {new} ({setting.origin})")
            continue
        moved = [_moved(setting, key, value) for key, value in new.items()]
        (outranking if pattern.startswith("!") else result).extend(moved)
    return [*result, *outranking]


def _new_settings(
    key: str, value: JsonValue, values: Values, tree: str
) -> tuple[str, JsonObject | str]:
    """The pattern that names a key, and the settings in its place or what values it takes."""
    for pattern, (compute, _) in COMPUTED.items():
        if (tree == "ppo_trainer" or pattern[0] == "*") and names(pattern.lstrip("!"), key):
            return pattern, compute(key, value, values)
    rows = [rule for rule in rules("rewritten", tree=tree) if rule.pattern.lstrip("!") == key]
    for rule in rows:
        if rule.has(value) and holds(rule.where, lambda name: values.get(name, ABSENT)):
            one_more = value + 1 if isinstance(value, int) else value
            stands = {"*": value, "*+1": one_more}
            return rule.pattern, {k: stands.get(str(v), v) for k, v in rule.settings.items()}
    if rows and value not in (None, False):
        return "", "takes an integer" if rows[0].values == ("count",) else "takes true or false"
    return "", {} if rows else {key: value}


def holds(condition: str, read: Callable[[str], Value]) -> bool:
    """Whether every term is true: `key` was set, `!key` was not, `key=a,b`, `key!=a`, `key<=1`, `key>1`."""
    for term in filter(None, condition.split(" and ")):
        match = _TERM.fullmatch(term)
        assert match is not None, term
        value, sign = read(match[2]), match[3]
        if sign is None:
            true = (value is ABSENT) == bool(match[1])
        elif sign in ("<=", ">"):
            true = isinstance(value, int | float) and (value > float(match[4])) == (sign == ">")
        else:
            true = is_one_of(value, scalars(match[4])) == (sign == "=")
        if not true:
            return False
    return True


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
