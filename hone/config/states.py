"""Keys and values of verl that have no field of their own here: one data table, `other_keys.txt`.

A key of the table is refused, neutral (it runs; a value that asks for something else is noted at start),
rewritten or renamed. A key in none of them is a field, and works. To make a key work, delete its row and
write the field.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files

from hone.config.convert import same, show_value
from hone.types import JsonValue

OFF = (None, False, 0, -1, "", "none", "None", "disabled", "???")
_WORDS = {"true": True, "false": False, "null": None}
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
