"""Summarizes what a run would do and need, for `hone train --dry-run`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from hone.config import PPOTrainerConfig
from hone.models.facts import ModelFacts
from hone.trainer.ppo.plan import Plan
from hone.trainer.ppo.row_checks import Lengths
from hone.trainer.ppo.trainer import PPOTrainer
from hone.trainer.threads import uses_gpu

GIB = 2**30
OPTIMIZER_BYTES = 12
"""Bytes per trained parameter: the fp32 master weight and AdamW's two moments."""
BYTES_16_BIT, BYTES_32_BIT = 2, 4
CHECKPOINT_BYTES = 16
"""Bytes per parameter: master weight, two moments and the Hugging Face export."""


class ResourceEstimate:
    """Memory and disk space that a run needs, estimated from the number of parameters."""

    def __init__(self, config: PPOTrainerConfig, plan: Plan, facts: ModelFacts) -> None:
        self.config, self.plan, self.facts = config, plan, facts
        models = 2 if plan.needs_critic else 1
        self.checkpoint_bytes = CHECKPOINT_BYTES * (facts.parameters or 0) * models
        folder = Path(config.trainer.default_local_dir).expanduser().absolute()
        self._disk = next(p for p in (folder, *folder.parents) if p.exists())
        self.free_bytes = shutil.disk_usage(self._disk).free

    @property
    def memory_bytes(self) -> int:
        """Bytes per process for weights, gradients and optimizer, without activations and KV cache."""
        config = self.config
        dtype = config.actor_rollout_ref.actor.fsdp_config.dtype
        on_gpu = uses_gpu(config.trainer.device)
        is_16_bit = dtype in ("bf16", "bfloat16", "fp16", "float16") or (dtype == "auto" and on_gpu)
        weight_bytes = BYTES_16_BIT if is_16_bit else BYTES_32_BIT
        # fp32 weights need no separate master weights.
        trained_bytes = 2 * weight_bytes + OPTIMIZER_BYTES - (0 if is_16_bit else BYTES_32_BIT)
        lora = config.actor_rollout_ref.model.uses_lora
        actor = weight_bytes if lora else trained_bytes
        reference = weight_bytes if self.plan.needs_reference and not lora else 0
        critic = trained_bytes if self.plan.needs_critic else 0
        return (actor + reference + critic) * (self.facts.parameters or 0) // config.world_size

    def disk_problems(self) -> Iterator[str]:
        """Yields a problem if the disk has no space for another checkpoint."""
        if self.config.trainer.save_freq != 0 and self.checkpoint_bytes > self.free_bytes:
            yield (
                f"a checkpoint takes about {self.checkpoint_bytes / GIB:.1f} GiB and {self._disk} has "
                f"{self.free_bytes / GIB:.1f} GiB free; free space, name another "
                "trainer.default_local_dir, or set trainer.save_freq=0"
            )


def preview_lines(
    trainer: PPOTrainer, estimate: ResourceEstimate, lengths: Mapping[str, Lengths]
) -> Iterator[str]:
    """Yields the lines that summarize model, data, steps, roles and resources."""
    config, facts = trainer.config, estimate.facts
    policy, settings = config.actor_rollout_ref, config.trainer
    size = f", {facts.parameters:,} parameters" if facts.parameters else ""
    yield (
        f"train {policy.model.path} ({facts.family or 'model'}{size}) by "
        f"{config.algorithm.adv_estimator}, {policy.rollout.n} responses per prompt"
    )
    for key, dataset_lengths in lengths.items():
        span = f"{dataset_lengths.shortest:,} to {dataset_lengths.longest:,} tokens"
        yield f"{key}: {dataset_lengths.rows:,} prompts of {span}"
    prompts = config.data.train_batch_size
    updates = -(-prompts // policy.actor.ppo_mini_batch_size) * policy.actor.ppo_epochs
    yield (
        f"{trainer.total_steps:,} steps of {prompts} prompts × {policy.rollout.n} responses, "
        f"{updates} updates per step, in {settings.default_local_dir}"
    )
    roles = ", ".join(str(role) for role in trainer.roles)
    yield f"roles: {roles}; {config.world_size} process(es), device {settings.device}"
    if facts.parameters:
        yield (
            f"about {estimate.memory_bytes / GIB:.2f} GiB per process for weights, gradients and "
            "optimizer, without activations and KV cache; a checkpoint takes about "
            f"{estimate.checkpoint_bytes / GIB:.2f} of {estimate.free_bytes / GIB:.0f} GiB free"
        )
