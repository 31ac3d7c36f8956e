"""Blocks of the schema, which are also mappings, and defaults that follow other keys.

`config.get("clip_ratio_c", 3.0)`, `config["clip_ratio"]`, `"lam" in config` and `**config` work in a
user's loss, estimator or manager, as with verl's configs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from typing_extensions import dataclass_transform

from hone.config.convert import Value
from hone.suggestions import suggestion
from hone.types import Settings

B = TypeVar("B")
_MISSING = object()


def block(cls: type[B], **changes: Value) -> B:
    """Declares a field that is a block or a dict; a block is documented by the docstring of its class."""
    return dataclasses.field(default_factory=functools.partial(cls, **changes))


def follows(key: str) -> Value:
    """Declares a default that is the value of another key, as an OmegaConf interpolation; a key that begins
    with a dot is in the same block."""
    return "${" + key + "}"


def at_most(limit: int, key: str) -> Value:
    """Declares a default that is the smaller of `limit` and the value of another key."""
    return "${least:" + str(limit) + ",${" + key + "}}"


class MissingKey(KeyError, AttributeError):
    """Raised for a key that a block does not have; code written for verl catches it as AttributeError."""


class Block(Mapping[str, Any]):
    """A dataclass that is also a read-only mapping; properties can be read by name and are not iterated."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __getitem__(self, key: str) -> Any:
        if not isinstance(key, str):
            raise TypeError(f"a key of {type(self).__name__} is a string, not {key!r}")
        if key not in self:
            hint = suggestion(key, self)
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


def setting(config: Settings | None, key: str, defaults: type[Block]) -> Any:
    """Returns `config.<key>`, or the block's default if `config` is None or lacks the key."""
    value = _lookup(config, key)
    if value is _MISSING:
        value = _lookup(_default_block(defaults), key)
    if value is _MISSING:
        raise KeyError(f"neither the config nor {defaults.__name__} has the key {key}")
    return value


@functools.cache
def _default_block(cls: type[Block]) -> Block:
    return cls()


def config_value(config: Settings | None, key: str) -> Any:
    """Returns `config.<key>`, or None if the config lacks the key."""
    value = _lookup(config, key)
    return None if value is _MISSING else value


def _lookup(config: Settings | None, key: str) -> Any:
    """Returns the value of a dotted key, or _MISSING."""
    value: Any = config
    for part in key.split("."):
        if value is None or value is _MISSING:
            return _MISSING
        is_mapping = isinstance(value, Mapping)
        value = value.get(part, _MISSING) if is_mapping else getattr(value, part, _MISSING)
    return value
