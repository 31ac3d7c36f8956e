"""The blank manager: every reward is 0, and only process rewards are used for training."""

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
