"""The small words the schema is written in (`follows`, `at_most`) and the walk over dotted keys.

A field whose default is another key's value says so with `follows("a.b")`; nothing here knows any key.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from typing import Any, TypeAlias, TypeVar

from hone.config.block import Block
from hone.config.errors import ConfigError, did_you_mean, nearest

B = TypeVar("B", bound=Block)

Hint: TypeAlias = Any
"""A type hint: a class, a union, a literal or a generic."""
Value: TypeAlias = Any
"""The value of a key: what its field's type says."""


def follows(key: str) -> Value:
    """Default that takes the value of another key (an OmegaConf interpolation)."""
    return "${" + key + "}"


def at_most(limit: int, key: str) -> Value:
    """Default that is `limit`, or the value of another key where that is smaller."""
    return "${least:" + str(limit) + ",${" + key + "}}"


def at_least(limit: int, key: str) -> Value:
    """Default that is `limit`, or the value of another key where that is larger."""
    return "${most:" + str(limit) + ",${" + key + "}}"


@functools.cache
def hints(cls: type) -> dict[str, Hint]:
    """Resolved annotations of a schema class."""
    return typing.get_type_hints(cls)


def block_type(annotation: Hint) -> type | None:
    """The schema class behind an annotation, or None for a plain value."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    return None


def walk_fields(
    cls: type, default: Value = None, prefix: str = ""
) -> Iterator[tuple[str, type, str, Value]]:
    """Yield `(dotted key, owning class, annotation, default)` for every leaf below `cls`."""
    instance = cls() if default is None else default
    for field in dataclasses.fields(cls):
        value = getattr(instance, field.name)
        key = f"{prefix}{field.name}"
        inner = block_type(hints(cls)[field.name])
        if inner is not None:
            yield from walk_fields(inner, value, key + ".")
        else:
            yield key, cls, field.type if isinstance(field.type, str) else str(field.type), value


def get(config: Value, key: str) -> Value:
    """The value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def replace(config: B, key: str, value: Value) -> B:
    """A copy of the tree with one dotted key changed; the key must exist."""
    name, _, rest = key.partition(".")
    if name not in list(config):
        raise ConfigError(
            f"{type(config).__name__} has no key '{name}'.{did_you_mean(nearest(name, config))}"
        )
    changed = replace(getattr(config, name), rest, value) if rest else value
    return dataclasses.replace(config, **{name: changed})
