"""The table of reward managers by name; users register theirs or name it `pkg.mod:Class`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hone.plugins import Table

if TYPE_CHECKING:
    from hone.rewards.managers.abstract import AbstractRewardManager

M = TypeVar("M", bound=type)

_HERE = "hone.rewards.managers"

MANAGERS: Table[type[AbstractRewardManager]] = Table(
    "reward manager",
    {
        "naive": f"{_HERE}.naive:NaiveRewardManager",
        "batch": f"{_HERE}.batch:BatchRewardManager",
        "prime": f"{_HERE}.prime:PrimeRewardManager",
        "dapo": f"{_HERE}.dapo:DAPORewardManager",
        "blank": f"{_HERE}.blank:BlankRewardManager",
        "rate_limited": f"{_HERE}.streaming:RateLimitedRewardManager",
    },
)


def register(name: str) -> Callable[[M], M]:
    """Class decorator that makes the class available as `reward_manager.name=<name>`."""
    return MANAGERS.register(name)


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """Returns the class of that name, or of "pkg.mod:Class"; an unknown name is an error."""
    return MANAGERS.get(name)
