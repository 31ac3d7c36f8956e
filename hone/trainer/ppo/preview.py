"""Summarizes what a run would do and need, for `hone train --dry-run`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from hone.checks.row_checks import PromptLengths
from hone.config import PPOTrainerConfig
from hone.models.facts import FolderFacts
from hone.trainer.ppo.plan import Plan
from hone.trainer.ppo.trainer import PPOTrainer
from hone.trainer.threads import uses_gpu

GIB = 2**30
BYTES_16_BIT, BYTES_32_BIT = 2, 4


class ResourceEstimate:
    """Estimates the memory and disk space that a run needs from the number of parameters."""

    def __init__(self, config: PPOTrainerConfig, plan: Plan, folder_facts: FolderFacts) -> None:
        self.config, self.plan, self.folder_facts = config, plan, folder_facts
        self.parameters = folder_facts.parameters or 0
        folder = Path(config.trainer.default_local_dir).expanduser().absolute()
        self._disk_folder = next(path for path in (folder, *folder.parents) if path.exists())
        self.free_bytes = shutil.disk_usage(self._disk_folder).free
        dtype = config.actor_rollout_ref.actor.fsdp_config.dtype
        is_auto_16_bit = dtype == "auto" and uses_gpu(config.trainer.device)
        is_16_bit = is_auto_16_bit or dtype in ("bf16", "bfloat16", "fp16", "float16")
        self._weight_bytes = BYTES_16_BIT if is_16_bit else BYTES_32_BIT
        # AdamW's two moments; 16-bit weights also have fp32 master weights.
        self._optimizer_bytes = (3 if is_16_bit else 2) * BYTES_32_BIT

    @property
    def memory_bytes(self) -> int:
        """The bytes per process for weights, gradients and optimizer, without activations and KV cache."""
        trained_bytes = 2 * self._weight_bytes + self._optimizer_bytes
        uses_lora = self.config.actor_rollout_ref.model.uses_lora
        total = self._weight_bytes if uses_lora else trained_bytes
        if self.plan.needs_reference and not uses_lora:
            total += self._weight_bytes
        if self.plan.needs_critic:
            total += trained_bytes
        return total * self.parameters // self.config.world_size

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of a checkpoint's parts; LoRA saves no base weights, except in the actor's export."""
        policy, critic = self.config.actor_rollout_ref, self.config.critic
        part_bytes = {"model": self._weight_bytes, "optimizer": self._optimizer_bytes}
        actor_contents = policy.actor.checkpoint.save_contents
        actor_bytes = sum(part_bytes.get(part, 0) for part in actor_contents)
        export_bytes = self._weight_bytes if "hf_model" in actor_contents else 0
        total = export_bytes + (0 if policy.model.uses_lora else actor_bytes)
        if self.plan.needs_critic and critic.model.lora_rank == 0:
            total += sum(part_bytes.get(part, 0) for part in critic.checkpoint.save_contents)
        if self.plan.needs_implicit_rewards:  # the reward model has the actor's save_contents
            total += actor_bytes
        return total * self.parameters

    def disk_problems(self) -> Iterator[str]:
        """Yields a problem if the disk has no space for another checkpoint."""
        if self.config.trainer.save_freq != 0 and self.checkpoint_bytes > self.free_bytes:
            yield (
                f"a checkpoint takes about {_size_text(self.checkpoint_bytes)} and {self._disk_folder} "
                f"has {_size_text(self.free_bytes)} free; free space, name another "
                "trainer.default_local_dir, or set trainer.save_freq=0"
            )


def _size_text(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes >= GIB else f"{size_bytes / 2**20:.2f} MiB"


def preview_lines(
    trainer: PPOTrainer, estimate: ResourceEstimate, lengths: Mapping[str, PromptLengths]
) -> Iterator[str]:
    """Yields the lines that summarize model, data, steps, roles and resources."""
    config, folder_facts = trainer.config, estimate.folder_facts
    policy, trainer_config = config.actor_rollout_ref, config.trainer
    size = f", {folder_facts.parameters:,} parameters" if folder_facts.parameters else ""
    yield (
        f"train {policy.model.path} ({folder_facts.family or 'model'}{size}) by "
        f"{config.algorithm.adv_estimator}, {policy.rollout.n} responses per prompt"
    )
    for key, dataset_lengths in lengths.items():
        length_range = f"{dataset_lengths.shortest:,} to {dataset_lengths.longest:,} tokens"
        yield f"{key}: {dataset_lengths.rows:,} prompts of {length_range}"
    prompts_per_step, actor = config.data.train_batch_size, policy.actor
    updates = -(-prompts_per_step // actor.ppo_mini_batch_size) * actor.ppo_epochs
    yield (
        f"{trainer.total_steps:,} steps of {prompts_per_step} prompts × {policy.rollout.n} responses, "
        f"{updates} update{'s' * (updates > 1)} per step, in {trainer_config.default_local_dir}"
    )
    roles = ", ".join(str(role) for role in trainer.roles)
    processes = f"{config.world_size} process{'es' * (config.world_size > 1)}"
    yield f"roles: {roles}; {processes}, device {trainer_config.device}"
    if folder_facts.parameters:
        yield (
            f"about {estimate.memory_bytes / GIB:.2f} GiB per process for weights, gradients and "
            "optimizer, without activations and KV cache; a checkpoint takes about "
            f"{_size_text(estimate.checkpoint_bytes)} of {_size_text(estimate.free_bytes)} free"
        )
