"""The functions of `verl.trainer.ppo.reward`."""

from __future__ import annotations

from typing import Any

import torch

from hone.config.trees import PPOTrainerConfig
from hone.plugins import TableView
from hone.protocol import DataProto
from hone.rewards.loading import compute_reward as compute_reward
from hone.rewards.loading import get_custom_reward_fn as get_custom_reward_fn
from hone.rewards.loading import load_reward_manager as load_reward_manager
from hone.rewards.managers.registry import MANAGERS
from hone.tokenizer import Tokenizer
from hone.types import Fields, Function

REWARD_MANAGER_REGISTRY = TableView(MANAGERS)


def extract_reward(batch: DataProto) -> tuple[torch.Tensor, Fields]:
    """Returns the rewards [B, T] and the extra columns that scoring wrote to a batch."""
    names = batch.meta_info.get("reward_extra_keys", ())
    return batch.batch["rm_scores"], {name: batch.non_tensor_batch[name] for name in names}


def _reward_task(
    data: DataProto,
    config: PPOTrainerConfig | None = None,
    tokenizer: Tokenizer | None = None,
    reward_fn: Function | None = None,
) -> tuple[torch.Tensor, Fields]:
    """Calls `compute_reward`, by default with the manager that the config selects."""
    if reward_fn is None:
        if config is None or tokenizer is None:
            raise TypeError("compute_reward_async needs reward_fn, or config and tokenizer")
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0)
    return compute_reward(data, reward_fn)


def __getattr__(name: str) -> Any:
    """Creates verl's `compute_reward_async` on first use, so that Ray is imported only then."""
    if name != "compute_reward_async":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hone.controller.ray import ray_task

    globals()[name] = task = ray_task(_reward_task)
    return task
