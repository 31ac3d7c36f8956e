"""The reward managers of verl's reward loop that have the names of other managers of hone."""

from __future__ import annotations

from hone.config.reward import OverlongBufferConfig
from hone.protocol import DataProto
from hone.rewards.managers import registry
from hone.rewards.managers.dapo import overlong_penalty
from hone.rewards.managers.reward_loop import (
    RateLimitedRewardManager,
    RewardManagerBase,
    result_dict,
    reward_kwargs_of,
)
from hone.rewards.managers.rule import AbstractRewardManager
from hone.types import Fields


class NaiveRewardManager(RewardManagerBase):
    """Calls the score function once per trajectory."""

    async def run_single(self, data: DataProto) -> Fields:
        score, extra_info, _ = await self._score(data)
        return result_dict(score, extra_info)


class DAPORewardManager(RewardManagerBase):
    """`NaiveRewardManager` with DAPO's penalty for responses close to the length limit."""

    async def run_single(self, data: DataProto) -> Fields:
        reward, extra_info, length = await self._score(data)
        settings = reward_kwargs_of(self.config)
        buffer = settings.get("overlong_buffer_cfg") or {}
        buffer = OverlongBufferConfig(**buffer) if isinstance(buffer, dict) else buffer
        max_resp_len = settings.get("max_resp_len") or self.config["data"]["max_response_length"]
        if buffer.enable:
            penalty = overlong_penalty(length, max_resp_len, buffer.len, buffer.penalty_factor)
            reward += penalty
            if buffer.log:
                extra_info |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return result_dict(reward, extra_info)


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """Returns a manager class by name; verl's classes replace those of the registry."""
    managers: dict[str, type[AbstractRewardManager]] = {
        "naive": NaiveRewardManager,
        "dapo": DAPORewardManager,
        "rate_limited": RateLimitedRewardManager,
    }
    return managers.get(name) or registry.get_reward_manager_cls(name)
