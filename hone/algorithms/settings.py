"""Reads one dotted key from a config object or a dict, and falls back to the block's defaults.

Only hone.config defines defaults: the argument `defaults` is the class of a config block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from hone.config.block import Block
from hone.config.errors import did_you_mean, nearest
from hone.types import Settings

_MISSING = object()


def setting(config: Settings | None, key: str, defaults: type[Block]) -> Any:
    """Returns `config.<key>`, or the block's default if `config` is None or lacks the key."""
    value = _lookup(config, key)
    if value is _MISSING:
        value = _lookup(_default_block(defaults), key)
    if value is _MISSING:
        raise KeyError(f"neither the config nor {defaults.__name__} has the key {key}")
    return value


def config_value(config: Settings | None, key: str) -> Any:
    """Returns `config.<key>` if the config itself has it, else None."""
    value = _lookup(config, key)
    return None if value is _MISSING else value


def has_key(config: Settings | None, key: str) -> bool:
    """Returns whether the config itself has the key."""
    return _lookup(config, key) is not _MISSING


def _lookup(config: Settings | None, key: str) -> Any:
    """Returns the value of a dotted key, or _MISSING."""
    value: Any = config
    for part in key.split("."):
        if value is None or value is _MISSING:
            return _MISSING
        is_mapping = isinstance(value, Mapping)
        value = value.get(part, _MISSING) if is_mapping else getattr(value, part, _MISSING)
    return value


@cache
def _default_block(block: type[Block]) -> Block:
    return block()


def raise_if_unknown(
    function_name: str, unknown_names: Iterable[str], known_names: Iterable[str]
) -> None:
    """Raises TypeError for the first unknown keyword argument, and suggests the closest known one."""
    names = list(known_names)
    for name in unknown_names:
        raise TypeError(
            f"{function_name} takes no argument {name!r}.{did_you_mean(nearest(name, names))} "
            f"It takes {', '.join(names)}"
        )
