"""Building blocks of the schema: dict-like blocks, and defaults that follow other keys.

`config.get("clip_ratio_c", 3.0)`, `config["clip_ratio"]`, `"lam" in config` and `**config` work in a
user's loss, estimator or manager, as with verl's configs. Blocks are read-only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from typing_extensions import dataclass_transform

from hone.config.convert import Value
from hone.config.errors import did_you_mean, nearest

B = TypeVar("B")


def block(cls: type[B], **changes: Value) -> B:
    """Declares a field that is a block or a dict; the docstring of a block is that of its class."""
    return dataclasses.field(default_factory=functools.partial(cls, **changes))


def follows(key: str) -> Value:
    """Declares a default that is the value of another key (an OmegaConf interpolation); `.key` is a key of
    the same block."""
    return "${" + key + "}"


def at_most(limit: int, key: str) -> Value:
    """Declares a default that is the smaller of `limit` and the value of another key."""
    return "${least:" + str(limit) + ",${" + key + "}}"


class MissingKey(KeyError, AttributeError):
    """A key that a block does not have; code written for verl catches it as AttributeError."""


class Block(Mapping[str, Any]):
    """A dataclass that is also a read-only mapping.

    Derived values (properties) can also be read by name; iteration yields only the fields.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __getitem__(self, key: str) -> Any:
        if not isinstance(key, str):
            raise TypeError(f"a key of {type(self).__name__} is a string, not {key!r}")
        if key not in self:
            hint = did_you_mean(nearest(key, self))
            raise MissingKey(f"{type(self).__name__} has no key {key!r}.{hint}")
        return getattr(self, key)

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the value of a key, or `default` if the block has no such key."""
        return getattr(self, key) if key in self else default

    def __contains__(self, key: object) -> bool:
        is_property = isinstance(getattr(type(self), str(key), None), property)
        return is_property or key in vars(self)

    def __iter__(self) -> Iterator[str]:
        return iter(getattr(type(self), "__dataclass_fields__", {}))

    def __len__(self) -> int:
        return len(list(iter(self)))


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class SchemaBlock(Block):
    """A block of the schema: every subclass is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)
