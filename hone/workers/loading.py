"""The policy as its model folder has it, on this process's device; the same for every role that holds one."""

from __future__ import annotations

from dataclasses import replace

import torch

from hone.config import PPOTrainerConfig, load_config
from hone.config.block import Block
from hone.config.critic import CriticConfig
from hone.config.schema import ActorRolloutRefConfig
from hone.models.from_config import build_lora
from hone.models.load import load_causal_lm
from hone.models.policy import PolicyModel


def whole_config(config: Block) -> PPOTrainerConfig:
    """The run's whole config; verl builds workers from a part of it, and the rest is then default."""
    if isinstance(config, PPOTrainerConfig):
        return config
    if isinstance(config, ActorRolloutRefConfig):
        return replace(load_config(), actor_rollout_ref=config)
    if isinstance(config, CriticConfig):
        return replace(load_config(), critic=config)
    raise TypeError(
        f"a worker is built from a run's config, its actor_rollout_ref or its critic, not from a "
        f"{type(config).__name__}"
    )


def load_policy(
    config: PPOTrainerConfig, dtype: torch.dtype, device: torch.device, *, adapters: bool
) -> PolicyModel:
    """With `adapters`, LoRA's are added where the config asks for them."""
    model = config.actor_rollout_ref.model
    lm = load_causal_lm(
        model.path, dtype=dtype, override_config=model.override_config, device=device
    )
    if model.enable_gradient_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = PolicyModel(lm.to(device))
    if adapters and model.uses_lora:
        policy.lm = build_lora(policy.lm, model, config.trainer.seed)
    return policy
