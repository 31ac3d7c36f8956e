"""Keys and values of verl that have no field of their own here: one data table, `other_keys.txt`.

A key of the table is neutral (it runs; a value that asks for something else is noted at start) or refused.
A key in neither is a field, and works. To make a key work, delete its row and write the field.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from typing import Literal

from hone.config.convert import same, show_value
from hone.types import JsonValue

State = Literal["refused", "neutral"]
STATES: tuple[State, ...] = ("refused", "neutral")
OFF = (None, False, 0, -1, "", "none", "None", "disabled", "???")
WORDS = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class Rule:
    """State of the keys that a pattern names: `*` is one name, `**` any number of them."""

    pattern: str
    state: State
    why: str
    values: tuple[JsonValue, ...] = ()
    """What may be written without a word; "off" and "any" stand for many values."""
    tree: str | None = None

    @property
    def usual(self) -> JsonValue:
        """What a reference to a key that was not written comes to."""
        return next((v for v in self.values if v not in ("off", "any")), None)

    def is_silent(self, value: JsonValue) -> bool:
        """True for a value that asks for nothing that differs here."""
        return is_one_of(value, self.values)


@dataclass(frozen=True)
class Replacement:
    """A value that a working key takes for another one."""

    pattern: str
    values: tuple[JsonValue, ...]
    becomes: JsonValue
    why: str
    """Empty where both mean the same."""

    def takes(self, value: JsonValue) -> bool:
        return is_one_of(value, self.values) and not has_adapter(value)


@dataclass(frozen=True)
class Rewrite:
    """Settings that stand for a value of an old key; `*` is that value."""

    values: tuple[JsonValue, ...]
    settings: dict[str, JsonValue]

    def __str__(self) -> str:
        new = " ".join(f"{key}={show_value(value)}" for key, value in self.settings.items())
        return f"{', '.join(map(show_value, self.values))} is {new}"


def is_off(value: JsonValue) -> bool:
    """Whether a value says that a thing is not wanted."""
    if isinstance(value, Mapping | list | tuple):
        return all(is_off(v) for v in (value.values() if isinstance(value, Mapping) else value))
    return any(same(value, off) for off in OFF)


def is_one_of(value: JsonValue, words: tuple[JsonValue, ...]) -> bool:
    """Whether words of the table name a value; "off" and "any" stand for many."""
    if "any" in words or ("off" in words and is_off(value)):
        return True
    return any(same(value, word) for word in words)


def has_adapter(engine: JsonValue) -> bool:
    """Whether a rollout engine of this name can run: its adapter is here and its package is installed."""
    if not isinstance(engine, str) or not engine.isidentifier():
        return False
    return find_spec(f"hone.rollout.{engine}") is not None and find_spec(engine) is not None


def _scalar(text: str) -> JsonValue:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return list(scalars(text[1:-1])) if text.startswith("[") else WORDS.get(text, text)


def scalars(text: str) -> tuple[JsonValue, ...]:
    return tuple(_scalar(word.strip()) for word in text.split(",") if word.strip())


@functools.cache
def read_table(file: str) -> dict[str, list[list[str]]]:
    """Cells of every row of a table, by section."""
    sections: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in files("hone.config").joinpath(file).read_text("utf-8").splitlines():
        if line.startswith("["):
            rows = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            rows.append([cell.strip() for cell in line.split(" | ")])
    return sections


def _read(section: str) -> Iterator[tuple[str, str, list[str]]]:
    """Tree, pattern and other cells of a section, a row per pattern; the tree may be empty."""
    for patterns, *cells in read_table("other_keys.txt")[section]:
        for word in patterns.split():
            tree, _, pattern = word.rpartition(":")
            yield tree, pattern, cells


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Every neutral and refused key; the first rule that names a key decides."""
    return tuple(
        Rule(pattern, state, why, scalars(values), tree or None)
        for state in STATES
        for tree, pattern, (values, why) in _read(state)
    )


@functools.cache
def replacements() -> tuple[Replacement, ...]:
    """Every value that stands for another."""
    return tuple(
        Replacement(pattern, scalars(values), _scalar(becomes), why)
        for _, pattern, (values, becomes, why) in _read("values")
    )


def _of_tree(section: str, tree: str) -> Iterator[tuple[str, list[str]]]:
    """Rows of a tree; one without a name is `ppo_trainer`'s, `*` stands for every tree."""
    for owner, old, cells in _read(section):
        if (owner or "ppo_trainer") == tree or owner == "*":
            yield old, cells


@functools.cache
def renames(tree: str) -> dict[str, str]:
    """Old key or block (it ends in `.**`) to its name in a tree; the value stays."""
    return {old: new for old, (new,) in _of_tree("renamed", tree)}


@functools.cache
def rewrites(tree: str) -> dict[str, list[Rewrite]]:
    """Old key to the settings that its values stand for."""
    found: dict[str, list[Rewrite]] = {}
    for old, (values, new) in _of_tree("rewritten", tree):
        settings = {key: _scalar(value) for key, value in (w.split("=") for w in new.split())}
        found.setdefault(old, []).append(Rewrite(scalars(values), settings))
    return found


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


def new_key(old: str, new: str, key: str) -> str | None:
    """The key under its new name, where a pattern names it; what `**` stands for stays."""
    match = _compiled(old).fullmatch(key)
    if match is None:
        return None
    parts = [(match[1] or "") if part == "**" else part for part in new.split(".")]
    return ".".join(part for part in parts if part)


def rule_of(key: str, tree: str) -> Rule | None:
    """The rule that decides about a key without a field; None where no row names it."""
    return next((r for r in rules() if r.tree in (None, tree) and names(r.pattern, key)), None)


@functools.cache
def replacements_of(key: str) -> list[Replacement]:
    """The values of a key that stand for others."""
    return [r for r in replacements() if names(r.pattern, key)]


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
