"""Reward managers, which convert a batch to rewards per token; `register("name")` adds a user's class."""

from __future__ import annotations

from hone.rewards.managers.registry import get_reward_manager_cls, register
from hone.rewards.managers.rule import AbstractRewardManager

__all__ = ["AbstractRewardManager", "get_reward_manager_cls", "register"]
