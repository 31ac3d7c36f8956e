"""The actor and the reference: log-probs of what was said, and the policy's update."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from hone.config.engine import CheckpointConfig
from hone.controller import Dispatch, register
from hone.engine.strategies import build_strategy
from hone.models.from_config import build_tokenizer
from hone.ops.packing import shared_with_the_row_before
from hone.protocol import DataProto
from hone.workers.device import pick_device, prepare_process
from hone.workers.engine_specs import actor_spec, reference_spec
from hone.workers.objectives import PolicyObjective
from hone.workers.roofline import Roofline
from hone.workers.train import TrainWorker, measured


class ActorWorker(TrainWorker):
    """The policy under training."""

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.actor_rollout_ref.actor.checkpoint

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        whole, config = self.config, self.config.actor_rollout_ref
        device = pick_device(whole.trainer.device, self.local_rank)
        sharding = [config.actor.fsdp_config, config.ref.fsdp_config]
        prepare_process(device, self.world_size, config.nccl_timeout, sharding)
        self.tokenizer = build_tokenizer(config.model)
        self.hold(build_strategy(config.actor.strategy, actor_spec(whole, self, device)))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(
        self,
        data: DataProto,
        *,
        with_sum_pi_squared: bool = False,
        temperature: float | None = None,
    ) -> DataProto:
        """Log-probs and entropies; Σπ² per token where that is asked for."""
        out = self.engine.infer(
            data,
            temperature=self.temperature(temperature),
            with_entropy=True,
            with_sum_pi_squared=with_sum_pi_squared,
        )
        names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return DataProto.from_dict({names.get(name, name): x for name, x in out.items()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(
        self, data: DataProto, *, temperature: float | None = None
    ) -> DataProto:
        """The reference of a LoRA run: the actor with its adapters off."""
        asked = self.temperature(temperature)
        out = self.engine.infer(data, adapters=False, temperature=asked)
        return DataProto.from_dict({"ref_log_prob": out["log_probs"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(
        self, data: DataProto, *, step_rows: int | None = None, temperature: float | None = None
    ) -> DataProto:
        """Every update of this step; `step_rows` is how many rows all ranks have together."""
        actor = self.config.actor_rollout_ref.actor
        started = time.perf_counter()
        objective = PolicyObjective(
            actor,
            temperature=self.temperature(temperature),
            correction=self.config.algorithm.rollout_correction,
        )
        metrics = self.all_updates(data, objective, actor, step_rows, role="actor")
        return measured(metrics | self._device_metrics(data, time.perf_counter() - started))

    def _device_metrics(self, data: DataProto, seconds: float) -> dict[str, float]:
        """Share of the GPU's arithmetic that the updates used, and the most memory held so far."""
        device = self.engine.device
        if device.type != "cuda":
            return {}
        gib = 2**30
        found = {
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / gib,
            "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / gib,
        }
        if (roofline := Roofline.of(self.engine.facts, device)) is not None:
            seen = data.batch["attention_mask"]
            shared = shared_with_the_row_before(data.batch["prompts"], seen)
            epochs = self.config.actor_rollout_ref.actor.ppo_epochs
            share = roofline.update_share(seen.sum(1).tolist(), shared, seconds)
            found["perf/mfu"] = epochs * share / self.engine.mesh.ranks_per_slot
        return found

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        contents = self.checkpoint.save_contents
        with self.engine.present():
            super().save_checkpoint(folder)
            if "hf_model" in contents:
                self.engine.export(Path(folder), self.tokenizer)


class ReferenceWorker(TrainWorker):
    """The policy as it was loaded."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        config, ref = self.config.actor_rollout_ref, self.config.actor_rollout_ref.ref
        device = pick_device(self.config.trainer.device, self.local_rank)
        prepare_process(device, self.world_size, config.nccl_timeout, [ref.fsdp_config])
        self.hold(build_strategy(ref.strategy, reference_spec(self.config, self, device)))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(
        self, data: DataProto, *, temperature: float | None = None
    ) -> DataProto:
        out = self.engine.infer(data, temperature=self.temperature(temperature))
        return DataProto.from_dict({"ref_log_prob": out["log_probs"]})
