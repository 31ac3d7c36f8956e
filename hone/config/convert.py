"""Plain trees to frozen dataclasses, with types checked value by value.

OmegaConf's own structured configs know no union of a list and a string and name no origin; this does both.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar, Union

from hone.config.errors import ConfigError
from hone.config.keys import Hint, Value, block_type, hints

T = TypeVar("T")

_TRUE = {"true", "yes", "on", "1"}
_FALSE = {"false", "no", "off", "0"}


class _NoFit(Exception):
    """The value does not fit the annotation."""


def describe_type(annotation: Hint) -> str:
    """What a field takes, in words."""
    origin: Hint = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(a) for a in args)
    if origin is Literal:
        return "one of " + ", ".join(str(a) for a in args)
    if origin is tuple:
        return "a list of " + {int: "integers", float: "numbers", str: "strings"}.get(
            args[0], "values"
        )
    names = {
        int: "an integer",
        float: "a number",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    if annotation in names:
        return names[annotation]
    return "a mapping" if origin in (dict, Mapping) else "any value"


def _to_bool(value: Value) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise _NoFit


def _to_int(value: Value) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            raise _NoFit from None
    raise _NoFit


def _to_float(value: Value) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise _NoFit from None
    raise _NoFit


def _to_str(value: Value) -> str:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise _NoFit


_SCALARS: dict[Hint, Callable[[Value], Value]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
}


def fit(value: Value, annotation: Hint) -> Value:
    """`value` as the annotation wants it; raises `_NoFit` where it cannot be."""
    origin: Hint = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if annotation is typing.Any:
        return value
    if annotation in _SCALARS:
        return _SCALARS[annotation](value)
    if annotation is type(None):
        if value is None:
            return None
        raise _NoFit
    if origin is Literal:
        return _fit_literal(value, args)
    if origin in (Union, types.UnionType):
        return _fit_union(value, args)
    if origin is tuple:
        items = _items(value)
        if any(item is None for item in items):
            raise _NoFit
        return tuple(fit(item, args[0]) for item in items)
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        return dict(value)
    raise _NoFit


def _items(value: Value) -> list[Value] | tuple[Value, ...]:
    """A list as it is, one value as a list of one, a list inside a string (`'["a"]'`) as that list."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, str) and value.startswith("[") and value.endswith("]"):
        try:
            listed = json.loads(value.replace("'", '"'))
        except json.JSONDecodeError:
            return [value]
        return listed if isinstance(listed, list) else [value]
    return [value]


def _fit_literal(value: Value, choices: tuple[Value, ...]) -> Value:
    for choice in choices:
        if value == choice and isinstance(value, bool) == isinstance(choice, bool):
            return choice
    raise _NoFit


def _fit_union(value: Value, members: tuple[Hint, ...]) -> Value:
    exact = [m for m in members if m in (type(value), type(None)) and isinstance(value, m)]
    if type(value) is int and float in members:
        exact.append(float)  # before str, which takes every number
    for member in [*exact, *members]:
        try:
            return fit(value, member)
        except _NoFit:
            continue
    raise _NoFit


def build(cls: type[T], tree: Mapping[str, Value], origins: Mapping[str, str]) -> T:
    """The frozen dataclass tree for `tree`, whose keys are all known; every misfit is reported."""
    result, misfits = build_anyway(cls, tree, origins)
    if misfits:
        raise ConfigError(told_misfits(misfits, origins))
    return result


def build_anyway(
    cls: type[T], tree: Mapping[str, Value], origins: Mapping[str, str]
) -> tuple[T, dict[str, str]]:
    """The dataclass tree with what does not fit left as it is, and a sentence per such key."""
    misfits: dict[str, str] = {}
    result: T = _build(cls, tree, "", origins, misfits)
    return result, misfits


def told_misfits(misfits: Mapping[str, str], origins: Mapping[str, str]) -> list[str]:
    """The sentences to report: a key that only follows a misfit is not reported beside it."""
    return [text for key, text in misfits.items() if key in origins] or list(misfits.values())


def takes_null(annotation: Hint) -> bool:
    """Whether null is a value of the annotation."""
    try:
        return fit(None, annotation) is None
    except _NoFit:
        return False


def _build(
    cls: Hint,
    tree: Mapping[str, Value],
    prefix: str,
    origins: Mapping[str, str],
    problems: dict[str, str],
) -> Value:
    values: dict[str, Value] = {}
    for field in dataclasses.fields(cls):
        key, annotation, value = prefix + field.name, hints(cls)[field.name], tree[field.name]
        inner = block_type(annotation)
        if inner is not None:
            values[field.name] = _build(inner, value, key + ".", origins, problems)
            continue
        try:
            values[field.name] = fit(value, annotation)
        except _NoFit:
            what = f"{key}" if value is None else f"{key}={show_value(value)}"
            problems[key] = (
                f"{what} is {_kind(value)}; "
                f"expected {describe_type(annotation)} ({origins.get(key, 'default')})"
            )
            values[field.name] = value
    return cls(**values)


def _kind(value: Value) -> str:
    kinds = {type(None): "null", bool: "a truth value", int: "an integer", float: "a number"}
    kinds |= {str: "a string", list: "a list", tuple: "a list", dict: "a mapping"}
    return kinds.get(type(value), type(value).__name__)


def show_value(value: Value) -> str:
    """A value as one would write it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return value
