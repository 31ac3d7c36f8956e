"""Values and type hints: whether a value fits, what it becomes, and both in words.

OmegaConf's own structured configs know no union of a list and a string and name no origin; this does both.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from typing import Literal, Union

from hone.config.block import Hint, Value

_WORDS: dict[Hint, str] = {
    type(None): "null",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    **dict.fromkeys((list, tuple), "a list"),
    **dict.fromkeys((dict, Mapping), "a mapping"),
}
_TRUTH = {**dict.fromkeys(("true", "yes", "on", "1"), True)}
_TRUTH |= dict.fromkeys(("false", "no", "off", "0"), False)
_ACCEPTED = {int: (int, str), float: (int, float, str), str: (int, float, str)}


class NoFit(Exception):
    """The value does not fit the hint."""


def describe_type(hint: Hint) -> str:
    """What a field takes, in words."""
    origin: Hint = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(a) for a in args)
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin is tuple:
        return f"a list of {_WORDS[args[0]].split()[1]}s"
    return _WORDS.get(origin or hint, "any value")


def describe_kind(value: Value) -> str:
    """What kind of value was given, in words."""
    kind = type(value)
    return "a truth value" if kind is bool else _WORDS.get(kind, kind.__name__)


def fit(value: Value, hint: Hint) -> Value:
    """`value` as the hint wants it; raises `NoFit` where it cannot be."""
    origin: Hint = typing.get_origin(hint)
    args = typing.get_args(hint)
    if hint is typing.Any:
        return value
    if origin is Literal:
        for choice in args:
            if same(value, choice):
                return choice
    elif origin in (Union, types.UnionType):
        return _fit_union(value, args)
    elif origin is tuple:
        items = _items(value)
        if None not in items:
            return tuple(fit(item, args[0]) for item in items)
    elif origin in (dict, Mapping):
        if isinstance(value, Mapping):
            return dict(value)
    else:
        return _fit_scalar(value, hint)
    raise NoFit


def takes_null(hint: Hint) -> bool:
    """Whether null is a value of the hint."""
    return hint is typing.Any or type(None) in typing.get_args(hint)


def same(value: Value, other: Value) -> bool:
    """Equality that tells true from 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _fit_scalar(value: Value, kind: Hint) -> Value:
    if type(value) is kind:
        return value
    try:
        if kind is bool and isinstance(value, str):
            return _TRUTH[value.lower()]
        if not isinstance(value, bool) and isinstance(value, _ACCEPTED.get(kind, ())):
            return kind(value)
    except (KeyError, ValueError):
        pass
    raise NoFit


def _items(value: Value) -> list[Value] | tuple[Value, ...]:
    """A list as it is, one value as a list of one, a list inside a string (`'["a"]'`) as that list."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        try:
            return list(json.loads(value.replace("'", '"')))
        except json.JSONDecodeError:
            pass
    return [value]


def _fit_union(value: Value, members: tuple[Hint, ...]) -> Value:
    """The member of the value's own type comes first; a whole number is a float before it is a string."""
    exact = [type(value), *([float] if type(value) is int else [])]
    for member in [*(m for m in exact if m in members), *members]:
        try:
            return fit(value, member)
        except NoFit:
            continue
    raise NoFit


def show_value(value: Value) -> str:
    """A value as one would write it on the command line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return "[" + ",".join(show_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k}:{show_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, str):
        return repr(value) if value == "" or value != value.strip() or "\n" in value else value
    return str(value)


def to_plain(value: Value) -> Value:
    """Nested dicts and lists of a dataclass tree, as YAML or JSON would hold them."""
    if isinstance(value, Mapping):  # a block is one
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return value
