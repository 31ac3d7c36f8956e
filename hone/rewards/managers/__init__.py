"""Reward managers: a batch in, a reward for each token out.

`register("name")` on a class adds a user's own to the table in `registry.py`.
"""

from __future__ import annotations

from hone.rewards.managers.abstract import AbstractRewardManager
from hone.rewards.managers.registry import get_reward_manager_cls, register

__all__ = ["AbstractRewardManager", "get_reward_manager_cls", "register"]
