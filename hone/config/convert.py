"""Converts values to type hints, formats values and hints as text, and reads rules.txt."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import types
import typing
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal, TypeAlias, Union

from hone.types import JsonValue

Hint: TypeAlias = Any
"""A type hint: a class, a union, a literal or a generic."""
Value: TypeAlias = Any
"""The value of a key, in its field's type."""
Config: TypeAlias = Any
"""A config tree or a block of one; the class depends on the tree."""

_TYPE_WORDS: dict[Hint, str] = {
    type(None): "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    **dict.fromkeys((list, tuple), "a list"),
    **dict.fromkeys((dict, Mapping), "a mapping"),
}
_BOOLEAN_WORDS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLEAN_WORDS |= {"false": False, "no": False, "off": False, "0": False}
_CONSTANTS = {"true": True, "false": False, "null": None, '""': ""}
_ALTERNATIVES = re.compile(r"<([\w.,:*]+)>")
_CONVERTIBLE_TYPES = {int: (int, str), float: (int, float, str), str: (int, float, str)}
"""The types that `fit` converts to each type."""


class NoFit(Exception):
    """The value does not fit the hint."""


def describe_type(hint: Hint) -> str:
    """Describes in words what a field accepts."""
    origin: Hint = typing.get_origin(hint)
    members = typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(member) for member in members)
    if origin is Literal:
        return "one of " + ", ".join(map(str, members))
    if origin is tuple:
        count = "" if members[-1] is ... else f"{len(members)} "
        return f"a list of {count}{_TYPE_WORDS[members[0]].split()[1]}s"
    return _TYPE_WORDS.get(origin or hint, "any value")


def fit(value: Value, hint: Hint) -> Value:
    """Converts `value` to the type of the hint; raises `NoFit` if it does not fit."""
    origin: Hint = typing.get_origin(hint)
    members = typing.get_args(hint)
    if hint is Any or type(value) is hint:
        return value
    if origin in (Union, types.UnionType):
        # The type of the value is tried first; for an integer, float is tried before string.
        preferred_types = (type(value), float) if type(value) is int else (type(value),)
        for member in (*(t for t in preferred_types if t in members), *members):
            with contextlib.suppress(NoFit):
                return fit(value, member)
    elif origin is Literal and any(is_same_value(value, choice) for choice in members):
        return value
    elif origin is tuple and None not in (items := _items(value)):
        if members[-1] is ... or len(items) == len(members):
            return tuple(fit(item, members[0]) for item in items)
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        member_type = members[1] if members and members[1] in (int, float, str) else Any
        return {name: fit(item, member_type) for name, item in value.items()}
    elif hint is bool and isinstance(value, str) and value.lower() in _BOOLEAN_WORDS:
        return _BOOLEAN_WORDS[value.lower()]
    elif hint is int and isinstance(value, float) and value.is_integer():
        return int(value)  # the user may write 1000 as 1e3
    elif not isinstance(value, bool) and isinstance(value, _CONVERTIBLE_TYPES.get(hint, ())):
        with contextlib.suppress(ValueError):
            return hint(value)
    raise NoFit


def is_same_value(value: Value, other: Value) -> bool:
    """Returns whether two values are equal; true and 1 are different values."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _items(value: Value) -> list[Value] | tuple[Value, ...]:
    """Returns a list unchanged, parses a string such as `'["a"]'`, and wraps any other value in a list."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        with contextlib.suppress(json.JSONDecodeError):
            return list(json.loads(value.replace("'", '"')))
    return [value]


def show_value(value: Value) -> str:
    """Formats a value as a user writes it on the command line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(show_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{show_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, str) and (not value or value != value.strip() or "\n" in value):
        return repr(value)
    return str(value)


def to_plain(value: Value) -> Value:
    """Converts a tree of blocks to nested dicts and lists for YAML or JSON."""
    if isinstance(value, Mapping):  # a block is a mapping
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def parse_scalar(text: str) -> JsonValue:
    """Parses a value of `rules.txt`."""
    for member_type in (int, float):
        try:
            return member_type(text)
        except ValueError:
            continue
    return list(parse_scalars(text[1:-1])) if text.startswith("[") else _CONSTANTS.get(text, text)


def parse_scalars(text: str) -> tuple[JsonValue, ...]:
    """Parses comma-separated values."""
    return tuple(parse_scalar(word.strip()) for word in text.split(",") if word.strip())


@functools.cache
def read_rules(package: str) -> dict[str, list[list[str]]]:
    """Returns the cells of every row of the `rules.txt` of a package, by section."""
    sections: dict[str, list[list[str]]] = {}
    for line in files(package).joinpath("rules.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            rows = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            # A line with <a,b> stands for two rows, with a or b in place of <a,b> and of every <>.
            alternatives = _ALTERNATIVES.search(line) or ("<>", "<>")
            for word in alternatives[1].split(","):
                text = line.replace(alternatives[0], word).replace("<>", word)
                rows.append([cell.strip() for cell in re.split(r" \|(?= |$)", text)])
    return sections


def parse_pairs(text: str) -> dict[str, JsonValue]:
    """Parses space-separated `key=value` words of `rules.txt`."""
    pairs = (word.partition("=") for word in text.split())
    return {key: parse_scalar(value) for key, _, value in pairs}
