"""Sampling parameters of training and validation."""

from __future__ import annotations

from hone.config.rollout import RolloutConfig, SamplingConfig
from hone.types import Fields


def training_sampling(rollout: SamplingConfig) -> Fields:
    """Returns the `sampling_params` of training and of `hone generate`."""
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


def validation_sampling(rollout: RolloutConfig) -> Fields:
    """Returns the `sampling_params` of validation: greedy unless `val_kwargs.do_sample`."""
    val_kwargs = rollout.val_kwargs
    return training_sampling(rollout) | {
        "temperature": val_kwargs.temperature if val_kwargs.uses_sampling else 0.0,
        "top_k": val_kwargs.top_k,
        "top_p": val_kwargs.top_p,
        "min_p": val_kwargs.min_p,
    }
