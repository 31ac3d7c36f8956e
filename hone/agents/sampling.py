"""How trajectories are drawn: in training and in validation."""

from __future__ import annotations

from hone.config.rollout import RolloutConfig, SamplingConfig
from hone.types import Row


def training_sampling(rollout: SamplingConfig) -> Row:
    """`sampling_params` of agent loops in training, and of `hone generate`."""
    return {
        "temperature": rollout.temperature if rollout.do_sample else 0.0,
        "top_k": rollout.top_k,
        "top_p": rollout.top_p,
        "min_p": rollout.min_p,
        "stop": (rollout.stop,) if isinstance(rollout.stop, str) else tuple(rollout.stop or ()),
        "stop_token_ids": tuple(rollout.stop_token_ids or ()),
        "ignore_eos": rollout.ignore_eos,
        "max_tokens": rollout.max_tokens_per_turn,
    }


def validation_sampling(rollout: RolloutConfig) -> Row:
    """`sampling_params` in validation: greedy unless `do_sample`; a turn ends as in training."""
    wanted = rollout.val_kwargs
    return training_sampling(rollout) | {
        "temperature": wanted.temperature if wanted.samples else 0.0,
        "top_k": wanted.top_k,
        "top_p": wanted.top_p,
        "min_p": wanted.min_p,
    }
