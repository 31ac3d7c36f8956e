"""The small words the schema is written in (`follows`, `at_most`) and the walk over dotted keys.

A field whose default is another key's value says so with `follows("a.b")`; nothing here knows any key.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from typing import Any


def follows(key: str) -> Any:
    """Default that takes the value of another key (an OmegaConf interpolation)."""
    return "${" + key + "}"


def at_most(limit: int, key: str) -> Any:
    """Default that is `limit`, or the value of another key where that is smaller."""
    return "${least:" + str(limit) + ",${" + key + "}}"


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Resolved annotations of a schema class."""
    return typing.get_type_hints(cls)


def block_type(annotation: Any) -> type | None:
    """The schema class behind an annotation, or None for a plain value."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    return None


def walk_fields(
    cls: type, default: Any = None, prefix: str = ""
) -> Iterator[tuple[str, type, str, Any]]:
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
