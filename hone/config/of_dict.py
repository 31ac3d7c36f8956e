"""A dataclass from a dict or an OmegaConf tree, with verl's `omega_conf_to_dataclass`.

For code that makes a block by hand. A run's configuration is composed, with origins and references.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf

from hone.config.block import Value
from hone.config.errors import did_you_mean, nearest
from hone.config.keys import block_type, hints
from hone.types import Row, Settings

T = TypeVar("T")

_TARGET = "_target_"


def omega_conf_to_dataclass(
    config: DictConfig | Settings | T | None, dataclass_type: type[T] | None = None
) -> T | None:
    """The dataclass of that type, or of the type that `_target_` names; inner dicts too."""
    if dataclasses.is_dataclass(config):
        return config
    tree = plain_containers(config or {})  # type: ignore[arg-type]
    cls = dataclass_type or _named(tree)
    made: T | None = None if cls is None else _made(cls, tree)
    return made


def plain_containers(config: DictConfig | Settings) -> Row:
    """Dicts and lists all the way down, references followed."""
    made = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    tree = OmegaConf.to_container(made, resolve=True)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _made(cls: type, tree: Row) -> Value:
    fields = {field.name for field in dataclasses.fields(cls)}
    values: Row = {}
    for name, value in tree.items():
        if name == _TARGET:
            continue
        if name not in fields:
            hint = did_you_mean(nearest(name, fields))
            raise TypeError(f"{cls.__name__} has no field {name!r}.{hint}")
        inner = None
        if isinstance(value, Mapping):
            inner = block_type(hints(cls)[name]) or _named(value)
        values[name] = value if inner is None else _made(inner, dict(value))
    return cls(**values)


def _named(tree: Settings) -> type | None:
    """The class that `_target_` names; verl's own paths lead here."""
    target = re.sub(r"^verl(?=\.)", "hone", str(tree.get(_TARGET) or ""))
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name) if target else None
