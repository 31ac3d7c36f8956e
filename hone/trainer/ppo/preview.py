"""What a run would do and need, in a few lines: `hone train --dry-run` prints them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from hone.config import PPOTrainerConfig
from hone.models.facts import ModelFacts
from hone.trainer.ppo.plan import Plan
from hone.trainer.ppo.prompt_lengths import Lengths
from hone.trainer.ppo.trainer import PPOTrainer

GIB = 2**30
ADAM_BYTES = 12
"""Per parameter that is trained: the fp32 master and AdamW's two moments."""
HALF_BYTES, FULL_BYTES = 2, 4
CHECKPOINT_BYTES = 16
"""Per parameter: masters, two moments and the Hugging Face export."""


class Needs:
    """Memory and disk, estimated from how many parameters the weight files hold."""

    def __init__(self, config: PPOTrainerConfig, plan: Plan, facts: ModelFacts) -> None:
        self.config, self.plan, self.facts = config, plan, facts

    @property
    def memory_bytes(self) -> int:
        """Per process: weights, gradients and optimizer; activations and cache aside."""
        size, config = self.facts.parameters or 0, self.config
        width = HALF_BYTES if self._is_half else FULL_BYTES
        lora = config.actor_rollout_ref.model.uses_lora
        # fp32 weights are their own masters.
        trained = 2 * width + ADAM_BYTES - (0 if self._is_half else FULL_BYTES)
        actor = width if lora else trained
        reference = width if self.plan.reference and not lora else 0
        critic = trained if self.plan.critic else 0
        return (actor + reference + critic) * size // config.world_size

    @property
    def _is_half(self) -> bool:
        import torch

        dtype = self.config.actor_rollout_ref.actor.fsdp_config.dtype
        device = self.config.trainer.device
        cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
        return dtype in ("bf16", "bfloat16", "fp16", "float16") or (dtype == "auto" and cuda)

    @property
    def checkpoint_bytes(self) -> int:
        models = 2 if self.plan.critic else 1
        return CHECKPOINT_BYTES * (self.facts.parameters or 0) * models

    def disk(self) -> tuple[int, Path]:
        """Free bytes, and the folder that exists already of where the run will write."""
        folder = Path(self.config.trainer.default_local_dir).expanduser().absolute()
        place = next(p for p in (folder, *folder.parents) if p.exists())
        return shutil.disk_usage(place).free, place

    def disk_problems(self) -> Iterator[str]:
        """One checkpoint fits beside those that are kept."""
        if self.config.trainer.save_freq == 0 or not self.facts.parameters:
            return
        free, place = self.disk()
        if self.checkpoint_bytes > free:
            yield (
                f"a checkpoint takes about {self.checkpoint_bytes / GIB:.1f} GiB and {place} has "
                f"{free / GIB:.1f} GiB free; free space, name another trainer.default_local_dir, or "
                "set trainer.save_freq=0"
            )


def lines_of(trainer: PPOTrainer, needs: Needs, lengths: Mapping[str, Lengths]) -> Iterator[str]:
    """What would run, in a few lines."""
    config, facts = trainer.config, needs.facts
    rollout, settings = config.actor_rollout_ref.rollout, config.trainer
    size = f", {facts.parameters:,} parameters" if facts.parameters else ""
    yield (
        f"train {config.actor_rollout_ref.model.path} ({facts.family or 'model'}{size}) by "
        f"{config.algorithm.adv_estimator}, {rollout.n} responses per prompt"
    )
    for key, found in lengths.items():
        yield f"{key}: {found.rows:,} prompts of {found.shortest:,} to {found.longest:,} tokens"
    prompts = config.data.train_batch_size
    updates = -(-prompts // config.actor_rollout_ref.actor.ppo_mini_batch_size)
    yield (
        f"{trainer.total_steps:,} steps of {prompts} prompts × {rollout.n} responses, "
        f"{updates * config.actor_rollout_ref.actor.ppo_epochs} updates per step, "
        f"in {settings.default_local_dir}"
    )
    roles = ", ".join(str(role) for role in trainer.roles)
    yield f"roles: {roles}; {config.world_size} process(es), device {settings.device}"
    if facts.parameters:
        free, _ = needs.disk()
        yield (
            f"about {needs.memory_bytes / GIB:.2f} GiB per process for weights, gradients and "
            "optimizer, activations and cache aside; a checkpoint takes about "
            f"{needs.checkpoint_bytes / GIB:.2f} of {free / GIB:.0f} GiB free"
        )
