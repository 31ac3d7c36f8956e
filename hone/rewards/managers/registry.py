"""The one table of reward managers, by name.

Built-in managers are imported when first asked for; `register` adds a user's class.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from hone.rewards.managers.abstract import AbstractRewardManager

M = TypeVar("M", bound=type)

_BUILT_IN = {
    "naive": "hone.rewards.managers.naive:NaiveRewardManager",
    "batch": "hone.rewards.managers.batch:BatchRewardManager",
    "prime": "hone.rewards.managers.prime:PrimeRewardManager",
    "dapo": "hone.rewards.managers.dapo:DAPORewardManager",
    "blank": "hone.rewards.managers.blank:BlankRewardManager",
}
_registered: dict[str, type[Any]] = {}


def register(name: str) -> Callable[[M], M]:
    """Class decorator: make the class reachable as `reward_manager.name=<name>`."""

    def decorate(cls: M) -> M:
        known = _registered.get(name)
        if name in _BUILT_IN or (known is not None and known.__qualname__ != cls.__qualname__):
            raise ValueError(
                f"reward manager {name!r} is already {known or _BUILT_IN.get(name)}; "
                f"register {cls.__qualname__} under another name"
            )
        _registered[name] = cls
        return cls

    return decorate


def manager_names() -> list[str]:
    """Every name `get_reward_manager_cls` knows."""
    return sorted({*_BUILT_IN, *_registered})


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """The class registered as `name`."""
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        module, _, cls = _BUILT_IN[name].partition(":")
        found: type[AbstractRewardManager] = getattr(importlib.import_module(module), cls)
        return found
    close = difflib.get_close_matches(name, manager_names(), n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"no reward manager {name!r}.{hint} Known: {', '.join(manager_names())}. For your own, use "
        "@register, or reward_manager.source=importlib with reward_manager.module.{path,name}."
    )
