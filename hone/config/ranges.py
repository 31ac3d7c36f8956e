"""The range of every number that has one: a table from dotted key to bounds.

A bound that hangs on another key is a check, not a range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hone.config.convert import show_value


@dataclass(frozen=True)
class Range:
    """Bounds of a number; `above` and `below` exclude the bound itself. `-1` may stand for none."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    minus_one: bool = False

    def holds(self, value: float) -> bool:
        """True when the number lies inside."""
        if not math.isfinite(value):
            return False
        if self.minus_one and value == -1:
            return True
        low = self.least is None or value >= self.least
        over = self.above is None or value > self.above
        return low and over and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        parts = [] if self.least is None else [f"{show_value(self.least)} or more"]
        parts += [] if self.above is None else [f"above {show_value(self.above)}"]
        parts += [] if self.most is None else [f"at most {show_value(self.most)}"]
        return " and ".join(parts) + (", or -1" if self.minus_one else "")


POSITIVE = Range(least=1)
NOT_NEGATIVE = Range(least=0)
SHARE = Range(least=0, most=1)
TOP_P = Range(above=0, most=1)
SAMPLES = Range(least=1, minus_one=True)

_POLICY = "actor_rollout_ref"
_ROLLOUT = f"{_POLICY}.rollout"
_ACTOR = f"{_POLICY}.actor"


def _optimizer(prefix: str) -> dict[str, Range]:
    return {
        f"{prefix}.lr": NOT_NEGATIVE,
        f"{prefix}.lr_warmup_steps_ratio": SHARE,
        f"{prefix}.weight_decay": NOT_NEGATIVE,
        f"{prefix}.clip_grad": Range(above=0),
        f"{prefix}.min_lr_ratio": SHARE,
        f"{prefix}.lr_decay_steps_ratio": SHARE,
    }


RANGES: dict[str, Range] = {
    "data.train_batch_size": POSITIVE,
    "data.gen_batch_size": POSITIVE,
    "data.val_batch_size": POSITIVE,
    "data.max_prompt_length": POSITIVE,
    "data.max_response_length": POSITIVE,
    "data.train_max_samples": SAMPLES,
    "data.val_max_samples": SAMPLES,
    "trainer.nnodes": POSITIVE,
    "trainer.n_gpus_per_node": POSITIVE,
    "trainer.num_threads": POSITIVE,
    "trainer.total_epochs": POSITIVE,
    "trainer.total_training_steps": POSITIVE,
    "trainer.critic_warmup": NOT_NEGATIVE,
    "trainer.max_actor_ckpt_to_keep": POSITIVE,
    "trainer.max_critic_ckpt_to_keep": POSITIVE,
    "trainer.rollout_steps_to_keep": NOT_NEGATIVE,
    "trainer.log_val_generations": NOT_NEGATIVE,
    "trainer.log_train_generations": NOT_NEGATIVE,
    "trainer.phase_deadline_floor_s": Range(above=0),
    "trainer.phase_deadline_factor": Range(least=1),
    "trainer.liveness_deadline_s": Range(above=0),
    f"{_POLICY}.nccl_timeout": POSITIVE,
    f"{_POLICY}.model.lora_rank": NOT_NEGATIVE,
    f"{_POLICY}.model.lora_dropout": SHARE,
    f"{_ACTOR}.ppo_mini_batch_size": POSITIVE,
    f"{_ACTOR}.ppo_micro_batch_size": POSITIVE,
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": POSITIVE,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": POSITIVE,
    f"{_ACTOR}.ppo_epochs": POSITIVE,
    f"{_ACTOR}.clip_ratio": NOT_NEGATIVE,
    f"{_ACTOR}.clip_ratio_low": NOT_NEGATIVE,
    f"{_ACTOR}.clip_ratio_high": NOT_NEGATIVE,
    f"{_ACTOR}.clip_ratio_c": Range(above=1),
    f"{_ACTOR}.grad_clip": Range(above=0),
    f"{_ACTOR}.kl_loss_coef": NOT_NEGATIVE,
    f"{_ACTOR}.loss_scale_factor": Range(above=0),
    f"{_ROLLOUT}.n": POSITIVE,
    f"{_ROLLOUT}.temperature": NOT_NEGATIVE,
    f"{_ROLLOUT}.top_p": TOP_P,
    f"{_ROLLOUT}.top_k": Range(least=0, minus_one=True),
    f"{_ROLLOUT}.min_p": SHARE,
    f"{_ROLLOUT}.max_tokens_per_turn": POSITIVE,
    f"{_ROLLOUT}.max_num_seqs": POSITIVE,
    f"{_ROLLOUT}.max_model_len": POSITIVE,
    f"{_ROLLOUT}.prompt_length": POSITIVE,
    f"{_ROLLOUT}.response_length": POSITIVE,
    f"{_ROLLOUT}.gpu_memory_utilization": TOP_P,
    f"{_ROLLOUT}.log_prob_micro_batch_size": POSITIVE,
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": POSITIVE,
    f"{_ROLLOUT}.log_prob_max_token_len_per_gpu": POSITIVE,
    f"{_ROLLOUT}.val_kwargs.n": POSITIVE,
    f"{_ROLLOUT}.val_kwargs.temperature": NOT_NEGATIVE,
    f"{_ROLLOUT}.val_kwargs.top_p": TOP_P,
    f"{_ROLLOUT}.val_kwargs.top_k": Range(least=0, minus_one=True),
    f"{_ROLLOUT}.val_kwargs.min_p": SHARE,
    f"{_ROLLOUT}.multi_turn.max_assistant_turns": POSITIVE,
    f"{_ROLLOUT}.multi_turn.max_user_turns": POSITIVE,
    f"{_ROLLOUT}.multi_turn.max_parallel_calls": POSITIVE,
    f"{_ROLLOUT}.multi_turn.max_tool_calls": NOT_NEGATIVE,
    f"{_ROLLOUT}.multi_turn.tool_timeout_s": Range(above=0),
    f"{_ROLLOUT}.multi_turn.trajectory_timeout_s": Range(above=0),
    f"{_POLICY}.ref.log_prob_micro_batch_size": POSITIVE,
    f"{_POLICY}.ref.log_prob_micro_batch_size_per_gpu": POSITIVE,
    f"{_POLICY}.ref.log_prob_max_token_len_per_gpu": POSITIVE,
    "critic.ppo_mini_batch_size": POSITIVE,
    "critic.ppo_micro_batch_size": POSITIVE,
    "critic.ppo_micro_batch_size_per_gpu": POSITIVE,
    "critic.forward_micro_batch_size_per_gpu": POSITIVE,
    "critic.ppo_max_token_len_per_gpu": POSITIVE,
    "critic.forward_max_token_len_per_gpu": POSITIVE,
    "critic.ppo_epochs": POSITIVE,
    "critic.cliprange_value": Range(above=0),
    "critic.grad_clip": Range(above=0),
    "critic.model.lora_rank": NOT_NEGATIVE,
    "algorithm.gamma": SHARE,
    "algorithm.lam": SHARE,
    "algorithm.kl_ctrl.kl_coef": NOT_NEGATIVE,
    "algorithm.kl_ctrl.horizon": POSITIVE,
    "algorithm.kl_ctrl.target_kl": Range(above=0),
    "algorithm.filter_groups.max_inflight_gen_batches": POSITIVE,
    "algorithm.filter_groups.max_num_gen_batches": NOT_NEGATIVE,
    "algorithm.filter_groups.max_empty_gen_batches": POSITIVE,
    "reward_model.micro_batch_size": POSITIVE,
    "reward_model.micro_batch_size_per_gpu": POSITIVE,
    "reward_model.max_length": POSITIVE,
    "reward_model.sandbox_fusion.max_concurrent": POSITIVE,
    "reward_model.sandbox_fusion.memory_limit_mb": POSITIVE,
    "reward_model.reward_kwargs.num_processes": POSITIVE,
    "reward_model.reward_kwargs.timeout_s": Range(above=0),
    "reward_model.high_repeat_threshold": SHARE,
    "retriever.topk": POSITIVE,
    **_optimizer(f"{_ACTOR}.optim"),
    **_optimizer("critic.optim"),
}


def out_of_range(config: Any, ranges: dict[str, Range] = RANGES) -> list[str]:
    """One sentence for every number outside its range."""
    problems = []
    for key, bounds in ranges.items():
        value = config
        for name in key.split("."):
            value = getattr(value, name)
        if value is not None and not bounds.holds(value):
            problems.append(f"{key}={show_value(value)} is out of range; use {bounds}")
    return problems
