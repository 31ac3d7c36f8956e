"""Keys and values of verl that have no field of their own here: one data table, `other_keys.txt`.

A key of the table is neutral (it runs; a value that asks for something else is noted at start) or refused.
A key in neither is a field, and works. To make a key work, delete its row and write the field.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from typing import Literal

from hone.types import JsonValue

State = Literal["works", "neutral", "refused"]
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
        if "any" in self.values or ("off" in self.values and is_off(value)):
            return True
        return any(same(value, accepted) for accepted in self.values)


@dataclass(frozen=True)
class Replacement:
    """A value that a working key takes for another one."""

    pattern: str
    values: tuple[JsonValue, ...]
    becomes: JsonValue
    why: str
    """Empty where both mean the same."""

    def takes(self, value: JsonValue) -> bool:
        return any(same(value, written) for written in self.values) and not has_adapter(value)


WORKS = Rule("**", "works", "")


def is_off(value: JsonValue) -> bool:
    """Whether a value says that a thing is not wanted."""
    if isinstance(value, Mapping | list | tuple):
        return all(is_off(v) for v in (value.values() if isinstance(value, Mapping) else value))
    return any(same(value, off) for off in OFF)


def same(value: JsonValue, other: JsonValue) -> bool:
    """Equality that tells true from 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


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
    return WORDS.get(text, text)


def _scalars(text: str) -> tuple[JsonValue, ...]:
    return tuple(_scalar(word.strip()) for word in text.split(",") if word.strip())


@functools.cache
def _rows() -> dict[str, list[list[str]]]:
    """Cells of every row of the table, by section."""
    sections: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in files("hone.config").joinpath("other_keys.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            rows = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            rows.append([cell.strip() for cell in line.split(" | ")])
    return sections


@functools.cache
def rules() -> tuple[Rule, ...]:
    """Every neutral and refused key; the first rule that names a key decides."""

    def read(section: State) -> Iterator[Rule]:
        for patterns, values, why in _rows()[section]:
            for word in patterns.split():
                tree, _, pattern = word.rpartition(":")
                yield Rule(pattern, section, why, _scalars(values), tree or None)

    return (*read("refused"), *read("neutral"))


@functools.cache
def replacements() -> tuple[Replacement, ...]:
    """Every value that stands for another."""
    return tuple(
        Replacement(pattern, _scalars(values), _scalar(becomes), why)
        for patterns, values, becomes, why in _rows()["values"]
        for pattern in patterns.split()
    )


@functools.cache
def renames(tree: str) -> dict[str, str]:
    """Old key or block (it ends in `.**`) to its name in a tree; the value stays."""
    found: dict[str, str] = {}
    for old, new in _rows()["renamed"]:
        owner, _, key = old.rpartition(":")
        if (owner or "ppo_trainer") == tree or owner == "*":
            found[key] = new
    return found


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = [
        ".*" if p == "**" else re.escape(p).replace(r"\*", "[^.]*") for p in pattern.split(".")
    ]
    text = r"\.".join(parts)
    # `**` at the front also names keys at the root; at the end also the block itself.
    text = re.sub(r"^\.\*\\\.", r"(?:.*\\.)?", text)
    text = re.sub(r"\\\.\.\*$", r"(?:\\..*)?", text)
    return re.compile(text)


def names(pattern: str, key: str) -> bool:
    """Whether a pattern names a key."""
    return _compiled(pattern).fullmatch(key) is not None


def rule_of(key: str, tree: str, among: Sequence[Rule] | None = None) -> Rule | None:
    """The rule that decides about a key without a field; None where no row names it."""
    table = rules() if among is None else among
    return next((r for r in table if r.tree in (None, tree) and names(r.pattern, key)), None)


def replacement_of(key: str, value: JsonValue) -> Replacement | None:
    """What a value stands for, or None."""
    return next((r for r in replacements() if names(r.pattern, key) and r.takes(value)), None)


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
