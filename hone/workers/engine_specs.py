"""Builds the EngineSpec of each role from the config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hone.config import PPOTrainerConfig
from hone.config.engine import FSDPConfig, MicroBatches, sequence_parallel
from hone.controller import Worker
from hone.engine.contract import EngineSpec, MicroBatchRuleFactory
from hone.models.from_config import lora_adapters_or_none
from hone.models.lora import AdapterSettings
from hone.ops.rows import MicroBatchRule
from hone.workers.device import pick_dtype


def actor_spec(config: PPOTrainerConfig, worker: Worker, device: torch.device) -> EngineSpec:
    """Returns the actor's spec; as in verl, log-probs use the micro-batch size of the rollout config."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    return _spec(
        config,
        worker,
        device,
        actor,
        actor.fsdp_config,
        train_micro_batch_rule=_micro_batch_rule_factory(
            actor, "ppo_", actor.ppo_max_token_len_per_gpu
        ),
        infer_micro_batch_rule=_micro_batch_rule_factory(
            rollout, "log_prob_", rollout.log_prob_max_token_len_per_gpu
        ),
        optim=actor.optim,
        grad_clip=actor.grad_clip,
        adapters=lora_adapters_or_none(config.actor_rollout_ref.model),
        compile_blocks=actor.use_torch_compile,
        replays_routing=actor.router_replay.mode != "disabled",
    )


def reference_spec(config: PPOTrainerConfig, worker: Worker, device: torch.device) -> EngineSpec:
    """Returns the spec of the reference, which is not trained."""
    ref = config.actor_rollout_ref.ref
    rule = _micro_batch_rule_factory(ref, "log_prob_", ref.log_prob_max_token_len_per_gpu)
    return _spec(
        config,
        worker,
        device,
        ref,
        ref.fsdp_config,
        train_micro_batch_rule=rule,
        infer_micro_batch_rule=rule,
        compile_blocks=ref.use_torch_compile,
    )


def critic_spec(config: PPOTrainerConfig, worker: Worker, device: torch.device) -> EngineSpec:
    """Returns the critic's spec; without a model path, the critic starts from the actor's model."""
    critic, model = config.critic, config.critic.model
    adapters = None
    if model.lora_rank > 0:
        adapters = AdapterSettings(
            model.lora_rank, model.lora_alpha, 0.0, model.target_modules, None, None
        )
    return _spec(
        config,
        worker,
        device,
        critic,
        model.fsdp_config,
        head="value",
        model_path=model.path or config.actor_rollout_ref.model.path,
        override_config=model.override_config,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        train_micro_batch_rule=_micro_batch_rule_factory(
            critic, "ppo_", critic.ppo_max_token_len_per_gpu
        ),
        infer_micro_batch_rule=_micro_batch_rule_factory(
            critic, "forward_", critic.forward_max_token_len_per_gpu
        ),
        optim=critic.optim,
        grad_clip=critic.grad_clip,
        adapters=adapters,
    )


def implicit_reward_spec(
    config: PPOTrainerConfig, worker: Worker, device: torch.device, *, frozen: bool = False
) -> EngineSpec:
    """Returns the spec of PRIME's reward model, or of its frozen reference."""
    reward, model = config.reward_model, config.reward_model.model
    rule = _micro_batch_rule_factory(reward, "", reward.forward_max_token_len_per_gpu)
    return _spec(
        config,
        worker,
        device,
        reward,
        model.fsdp_config,
        model_path=(model.ref_path if frozen else None) or model.path,
        override_config=model.override_config,
        gradient_checkpointing=model.enable_gradient_checkpointing and not frozen,
        train_micro_batch_rule=rule,
        infer_micro_batch_rule=rule,
        optim=None if frozen else model.optim,
        grad_clip=model.optim.clip_grad,
    )


def process_reward_spec(
    config: PPOTrainerConfig,
    worker: Worker,
    device: torch.device,
    *,
    label_tokens: tuple[int, int] | None = None,
) -> EngineSpec:
    """Returns the spec of a process reward model, which is not trained."""
    spec = implicit_reward_spec(config, worker, device, frozen=True)
    path = str(config.reward_model.model.path)
    return replace(spec, head="step_scores", model_path=path, label_tokens=label_tokens)


def _micro_batch_rule_factory(
    role_config: MicroBatches, key_prefix: str, max_tokens: int
) -> MicroBatchRuleFactory:
    """Returns a function from the number of data-parallel slots to the rule that splits a mini-batch."""

    def make_rule(slots: int) -> MicroBatchRule:
        return MicroBatchRule(role_config.sequences_per_micro_batch(slots, key_prefix), max_tokens)

    return make_rule


def _spec(
    config: PPOTrainerConfig,
    worker: Worker,
    device: torch.device,
    role_config: MicroBatches,
    fsdp: FSDPConfig,
    **fields: Any,
) -> EngineSpec:
    """Returns the spec of a role; `fields` are added to, or replace, those of the actor's model."""
    model = config.actor_rollout_ref.model
    fields = {
        "head": "policy",
        "model_path": model.path,
        "override_config": model.override_config,
        "gradient_checkpointing": model.enable_gradient_checkpointing,
        **fields,
    }
    return EngineSpec(
        device=device,
        dtype=pick_dtype(fsdp.dtype, device),
        fsdp=fsdp,
        megatron=role_config.get("megatron", config.actor_rollout_ref.actor.megatron),
        response_width=config.actor_rollout_ref.rollout.response_length,
        seed=config.trainer.seed,
        rank=worker.rank,
        world_size=worker.world_size,
        sequence_parallel=sequence_parallel(role_config, fsdp),
        tensor_parallel=fsdp.tensor_parallel_size,
        **fields,
    )
