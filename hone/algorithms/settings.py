"""Reads one dotted key from a config object or a dict, and falls back to the block's defaults.

The defaults are defined in hone.config only: `defaults` is the class of the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from hone.config.block import Block
from hone.config.errors import did_you_mean, nearest
from hone.types import Settings

_ABSENT = object()


def setting(config: Settings | None, key: str, defaults: type[Block]) -> Any:
    """Returns `config.<key>`, or the block's default if `config` is None or lacks the key."""
    value = _dig(config, key)
    if value is _ABSENT:
        value = _dig(_default(defaults), key)
    if value is _ABSENT:
        raise KeyError(f"neither the given config nor {defaults.__name__} has the key {key}")
    return value


def given(config: Settings | None, key: str) -> Any:
    """Returns `config.<key>` if the config itself has it, else None."""
    value = _dig(config, key)
    return None if value is _ABSENT else value


def has(config: Settings | None, key: str) -> bool:
    """Returns whether the config itself has the key."""
    return _dig(config, key) is not _ABSENT


def _dig(config: Settings | None, key: str) -> Any:
    for part in key.split("."):
        if config is None:
            return _ABSENT
        if isinstance(config, Mapping):
            config = config.get(part, _ABSENT)
        else:
            config = getattr(config, part, _ABSENT)
        if config is _ABSENT:
            return _ABSENT
    return config


@cache
def _default(block: type[Block]) -> Block:
    return block()


def refuse_unknown(function: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raises TypeError for the first unknown keyword argument, and suggests the closest known one."""
    names = list(known)
    for name in unknown:
        raise TypeError(
            f"{function} takes no argument {name!r}.{did_you_mean(nearest(name, names))} "
            f"It takes {', '.join(names)}"
        )
