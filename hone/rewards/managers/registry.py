"""The table of reward managers by name; a user registers a class, or names it as `pkg.mod:Class`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.plugins import Table

if TYPE_CHECKING:
    from hone.rewards.managers.rule import AbstractRewardManager

_PACKAGE = "hone.rewards.managers"

MANAGERS: Table[type[AbstractRewardManager]] = Table(
    "reward manager",
    {
        "naive": f"{_PACKAGE}.rule:NaiveRewardManager",
        "batch": f"{_PACKAGE}.batch:BatchRewardManager",
        "prime": f"{_PACKAGE}.prime:PrimeRewardManager",
        "dapo": f"{_PACKAGE}.dapo:DAPORewardManager",
        "blank": f"{_PACKAGE}.blank:BlankRewardManager",
        "rate_limited": f"{_PACKAGE}.reward_loop:RateLimitedRewardManager",
    },
)

register = MANAGERS.register
"""A class decorator: `@register("mine")` makes the class available as `reward_manager.name=mine`."""
get_reward_manager_cls = MANAGERS.get
"""Returns the class of a name or of "pkg.mod:Class"; raises an error for an unknown name."""
