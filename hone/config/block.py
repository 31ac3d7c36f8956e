"""What every block of a tree can do beside its fields: be read like a dict, as verl's configs are.

`config.get("clip_ratio_c", 3.0)`, `config["clip_ratio"]`, `"lam" in config` and `**config` work in a
user's loss, estimator or manager. Nothing can be written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeAlias, TypeVar

from hone.config.errors import did_you_mean, nearest

B = TypeVar("B")

Hint: TypeAlias = Any
"""A type hint: a class, a union, a literal or a generic."""
Value: TypeAlias = Any
"""The value of a key: what its field's type says."""


def block(cls: type[B], **changes: Any) -> B:
    """A block inside another one; its docstring is that of its class."""
    return dataclasses.field(default_factory=functools.partial(cls, **changes))


class MissingKey(KeyError, AttributeError):
    """A key that a block does not have. Code written for verl catches it as AttributeError."""


class Block(Mapping[str, Any]):
    """A frozen dataclass that is also a read-only mapping.

    Derived values (properties) can be read by name too; iteration gives the fields alone.
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
        """The value of a key, `default` where the block has none of that name."""
        return getattr(self, key) if key in self else default

    def __contains__(self, key: object) -> bool:
        return key in [*self, *_properties(type(self)), *vars(self)]

    def __iter__(self) -> Iterator[str]:
        return iter(_fields(type(self)))

    def __len__(self) -> int:
        return len(_fields(type(self)))


@functools.cache
def _fields(cls: type) -> list[str]:
    return [field.name for field in getattr(cls, "__dataclass_fields__", {}).values()]


@functools.cache
def _properties(cls: type) -> list[str]:
    return [name for name in dir(cls) if isinstance(getattr(cls, name), property)]
