"""The table of reward managers by name; users register theirs or name it `pkg.mod:Class`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.plugins import Table

if TYPE_CHECKING:
    from hone.rewards.managers.abstract import AbstractRewardManager

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

register = MANAGERS.register
"""Class decorator: `@register("mine")` makes a class available as `reward_manager.name=mine`."""
get_reward_manager_cls = MANAGERS.get
"""Returns the class of a name or of "pkg.mod:Class"; an unknown name is an error."""
