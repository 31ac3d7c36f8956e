"""What each role's engine is built from, as the config says."""

from __future__ import annotations

import torch

from hone.config import PPOTrainerConfig
from hone.controller import Worker
from hone.engine.contract import EngineSpec
from hone.engine.microbatch import MicroBatchRule
from hone.models.from_config import adapters_of
from hone.models.lora import Adapters
from hone.workers.device import pick_dtype


def actor_spec(config: PPOTrainerConfig, worker: Worker, device: torch.device) -> EngineSpec:
    """The policy under training; log-probs are computed in micro-batches of the rollout's size."""
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout

    def train_rule(ranks: int) -> MicroBatchRule:
        rows = actor.sequences_per_micro_batch(ranks)
        return MicroBatchRule(rows, actor.ppo_max_token_len_per_gpu)

    def infer_rule(ranks: int) -> MicroBatchRule:
        rows = rollout.log_prob_sequences_per_micro_batch(ranks)
        return MicroBatchRule(rows, rollout.log_prob_max_token_len_per_gpu)

    return EngineSpec(
        head="policy",
        model_path=model.path,
        device=device,
        dtype=pick_dtype(actor.fsdp_config.dtype, device),
        fsdp=actor.fsdp_config,
        train_rule=train_rule,
        infer_rule=infer_rule,
        response_width=rollout.response_length,
        optim=actor.optim,
        grad_clip=actor.grad_clip,
        override_config=model.override_config,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        adapters=adapters_of(model),
        seed=config.trainer.seed,
        compile_blocks=actor.use_torch_compile,
        rank=worker.rank,
        world_size=worker.world_size,
    )


def reference_spec(config: PPOTrainerConfig, worker: Worker, device: torch.device) -> EngineSpec:
    """The policy as it was loaded, run forward only."""
    model, ref = config.actor_rollout_ref.model, config.actor_rollout_ref.ref

    def rule(ranks: int) -> MicroBatchRule:
        rows = ref.log_prob_sequences_per_micro_batch(ranks)
        return MicroBatchRule(rows, ref.log_prob_max_token_len_per_gpu)

    return EngineSpec(
        head="policy",
        model_path=model.path,
        device=device,
        dtype=pick_dtype(ref.fsdp_config.dtype, device),
        fsdp=ref.fsdp_config,
        train_rule=rule,
        infer_rule=rule,
        response_width=config.actor_rollout_ref.rollout.response_length,
        override_config=model.override_config,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        compile_blocks=ref.use_torch_compile,
        rank=worker.rank,
        world_size=worker.world_size,
    )


def critic_spec(config: PPOTrainerConfig, worker: Worker, device: torch.device) -> EngineSpec:
    """The value model under training; it starts from the actor's where no path is given."""
    critic, model = config.critic, config.critic.model

    def train_rule(ranks: int) -> MicroBatchRule:
        rows = critic.sequences_per_micro_batch(ranks)
        return MicroBatchRule(rows, critic.ppo_max_token_len_per_gpu)

    def infer_rule(ranks: int) -> MicroBatchRule:
        rows = critic.value_sequences_per_micro_batch(ranks)
        return MicroBatchRule(rows, critic.forward_max_token_len_per_gpu)

    adapters = None
    if model.lora_rank > 0:
        adapters = Adapters(
            model.lora_rank, model.lora_alpha, 0.0, model.target_modules, None, None
        )
    return EngineSpec(
        head="value",
        model_path=model.path or config.actor_rollout_ref.model.path,
        device=device,
        dtype=pick_dtype(model.fsdp_config.dtype, device),
        fsdp=model.fsdp_config,
        train_rule=train_rule,
        infer_rule=infer_rule,
        response_width=config.actor_rollout_ref.rollout.response_length,
        optim=critic.optim,
        grad_clip=critic.grad_clip,
        override_config=model.override_config,
        gradient_checkpointing=model.enable_gradient_checkpointing,
        adapters=adapters,
        seed=config.trainer.seed,
        rank=worker.rank,
        world_size=worker.world_size,
    )
