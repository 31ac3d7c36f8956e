"""Reward managers, which convert a batch to token rewards.

The class decorator `register("name")` adds a user-defined manager to the table in `registry.py`.
"""

from __future__ import annotations

from hone.rewards.managers.abstract import AbstractRewardManager
from hone.rewards.managers.registry import get_reward_manager_cls, register

__all__ = ["AbstractRewardManager", "get_reward_manager_cls", "register"]
