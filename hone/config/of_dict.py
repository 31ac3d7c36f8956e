"""verl's `omega_conf_to_dataclass`: makes a dataclass from a dict or an OmegaConf tree.

It is for code that creates a single block; the configuration of a run is composed instead.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping
from typing import TypeVar

from omegaconf import DictConfig, OmegaConf

from hone.config.convert import Value
from hone.config.errors import did_you_mean, nearest
from hone.config.keys import block_type, hints
from hone.types import Row, Settings

T = TypeVar("T")


def omega_conf_to_dataclass(
    config: DictConfig | Settings | T | None, dataclass_type: type[T] | None = None
) -> T | None:
    """Makes a dataclass of the given type or of the type named by `_target_`, including nested dicts."""
    if dataclasses.is_dataclass(config):
        return config
    block: T | None = _built(dataclass_type, plain_containers(config or {}))  # type: ignore[arg-type]
    return block


def plain_containers(config: DictConfig | Settings) -> Row:
    """Converts a config to nested dicts and lists, with references resolved."""
    made = config if isinstance(config, DictConfig) else OmegaConf.create(dict(config))
    tree: Value = OmegaConf.to_container(made, resolve=True)
    return {str(key): value for key, value in tree.items()}


def _built(cls: Value, tree: Settings) -> Value:
    """Makes a block of a class or of the one named by `_target_` (verl's paths are mapped to ours);
    returns None without a class."""
    target = re.sub(r"^verl(?=\.)", "hone", str(tree.get("_target_") or ""))
    module, _, name = target.rpartition(".")
    if cls is None and target:
        cls = getattr(importlib.import_module(module), name)
    if cls is None:
        return None
    values = {key: value for key, value in tree.items() if key != "_target_"}
    fields = {field.name for field in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in fields:
            hint = did_you_mean(nearest(key, fields))
            raise TypeError(f"{cls.__name__} has no field {key!r}.{hint}")
        if isinstance(value, Mapping):
            block = _built(block_type(hints(cls)[key]), value)
            values[key] = value if block is None else block
    return cls(**values)
