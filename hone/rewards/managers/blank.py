"""The blank manager gives every response the reward 0, for training with process rewards only."""

from __future__ import annotations

import torch

from hone.protocol import DataProto
from hone.rewards.managers.rule import AbstractRewardManager
from hone.types import Fields


class BlankRewardManager(AbstractRewardManager):
    """Returns zeros [B, T] for any batch."""

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | Fields:
        rewards = torch.zeros(data.batch["responses"].shape)  # [B, T]
        return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards
