"""Reads one dotted key from a configuration object, a dict, or, where it is silent, the defaults.

The defaults themselves live in hone.config only; this file knows their place, not their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_ABSENT = object()


def setting(config: Any, key: str, section: str) -> Any:
    """`config.<key>`; when `config` is None or lacks the key, the default of `<section>.<key>`."""
    value = _dig(config, key)
    if value is _ABSENT:
        value = _dig(_defaults(), f"{section}.{key}")
    if value is _ABSENT:
        raise KeyError(f"neither the given config nor the defaults have {section}.{key}")
    return value


def given(config: Any, key: str) -> Any:
    """`config.<key>` if the config itself has it, else None."""
    value = _dig(config, key)
    return None if value is _ABSENT else value


def _dig(config: Any, key: str) -> Any:
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


@lru_cache(maxsize=1)
def _defaults() -> Any:
    from hone.config import load_config

    return load_config()
