"""The actor and reference workers: log-probs of responses, policy updates and GPU utilization."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hone.config.engine import CheckpointConfig
from hone.controller import Dispatch, register
from hone.engine.contract import ModelFacts, Options
from hone.models.from_config import build_tokenizer, import_external
from hone.ops.packing import shared_prompt_lengths
from hone.protocol import DataProto
from hone.workers.engine_specs import actor_spec, reference_spec
from hone.workers.objectives import PolicyObjective
from hone.workers.train import TrainWorker

_GIB = 2**30
_CEILINGS_BY_DEVICE = {
    "H200": (790e12, 4.25e12),
    "H100": (790e12, 3.0e12),
    "A100": (280e12, 1.7e12),
    "L40S": (300e12, 0.75e12),
    "4090": (150e12, 0.9e12),
}
"""Dense bf16 FLOP/s and bytes/s that large kernels reach in practice, by part of the device name."""


class ActorWorker(TrainWorker):
    """The policy under training."""

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.actor_rollout_ref.actor.checkpoint

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        config = self.config.actor_rollout_ref
        self.tokenizer = build_tokenizer(config.model)
        fsdp_configs = (config.actor.fsdp_config, config.ref.fsdp_config)
        self.build_engine(config.actor.strategy, actor_spec, *fsdp_configs)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(
        self,
        data: DataProto,
        *,
        with_sum_pi_squared: bool = False,
        temperature: float | None = None,
    ) -> DataProto:
        """Computes the log-prob and entropy of each token and, if `with_sum_pi_squared` is set, Σπ²."""
        options: Options = {
            "temperature": self.temperature(temperature),
            "with_entropy": True,
            "with_sum_pi_squared": with_sum_pi_squared,
        }
        if self.config.actor_rollout_ref.actor.router_replay.mode == "R2":
            options["with_routing"] = True
        outputs = self.engine.infer(data, **options)
        column_names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return DataProto.from_dict(
            {column_names.get(name, name): values for name, values in outputs.items()}
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(
        self, data: DataProto, *, temperature: float | None = None
    ) -> DataProto:
        """Computes the reference log-probs of a LoRA run with the actor, its adapters disabled."""
        temperature = self.temperature(temperature)
        outputs = self.engine.infer(data, adapters=False, temperature=temperature)
        return DataProto.from_dict({"ref_log_prob": outputs["log_probs"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_actor(
        self, data: DataProto, *, num_step_rows: int | None = None, temperature: float | None = None
    ) -> DataProto:
        """Runs all updates of this step; `num_step_rows` is the number of rows on all ranks."""
        config = self.config.actor_rollout_ref.actor
        correction = self.config.algorithm.rollout_correction
        objective = PolicyObjective(
            config, temperature=self.temperature(temperature), correction=correction
        )
        updates = []
        start_time = time.perf_counter()
        with self.engine.on_device(optimizer=True):
            for minibatch in self.minibatches(data, config, num_step_rows):
                updates.append(self.engine.train_minibatch(minibatch, objective))
        metrics = self.end_updates("actor", updates)
        metrics |= self._device_metrics(data, time.perf_counter() - start_time)
        return DataProto(meta_info={"metrics": metrics})

    def _device_metrics(self, data: DataProto, seconds: float) -> dict[str, float]:
        """Returns the MFU of the updates and the peak memory."""
        device = self.engine.device
        if device.type != "cuda":
            return {}
        metrics = {
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / _GIB,
            "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / _GIB,
        }
        if (roofline := Roofline.for_device(self.engine.facts, device)) is not None:
            mask = data.batch["attention_mask"]
            shared_lengths = shared_prompt_lengths(data.batch["prompts"], mask)
            mfu = roofline.mfu(mask.sum(1).tolist(), shared_lengths, seconds)
            epochs = self.config.actor_rollout_ref.actor.ppo_epochs
            metrics["perf/mfu"] = epochs * mfu / self.engine.mesh.ranks_per_slot
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        with self.engine.on_device():
            super().save_checkpoint(folder)
            if "hf_model" in self.checkpoint.save_contents:
                self.engine.export(Path(folder), self.tokenizer)


class ReferenceWorker(TrainWorker):
    """The frozen initial policy."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        ref = self.config.actor_rollout_ref.ref
        import_external(self.config.actor_rollout_ref.model.external_lib)
        self.build_engine(ref.strategy, reference_spec, ref.fsdp_config)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(
        self, data: DataProto, *, temperature: float | None = None
    ) -> DataProto:
        outputs = self.engine.infer(data, temperature=self.temperature(temperature))
        return DataProto.from_dict({"ref_log_prob": outputs["log_probs"]})


@dataclass(frozen=True)
class Roofline:
    """The GPU utilization of updates (MFU) and of generation (MBU): achieved over attainable throughput.

    MFU counts operations (6 × parameters × tokens, plus attention). MBU counts bytes that decoding reads: the
    weights once per decode step and, for each token, the keys and values of the tokens before it.
    """

    flops_per_s: float
    bytes_per_s: float
    facts: ModelFacts

    @staticmethod
    def for_device(facts: ModelFacts, device: torch.device) -> Roofline | None:
        """Returns the roofline of a model on a device, or None for an unknown device."""
        if device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(device)
        ceilings = next((v for part, v in _CEILINGS_BY_DEVICE.items() if part in name), None)
        return None if ceilings is None else Roofline(*ceilings, facts)

    def mfu(self, lengths: Sequence[int], shared_lengths: Sequence[int], seconds: float) -> float:
        """Returns the model FLOPs utilization of forward and backward over rows of these lengths.

        `shared_lengths` has the number of tokens that each row shares with the previous row; shared tokens
        are computed and counted once.
        """
        rows = list(zip(lengths, shared_lengths, strict=True))
        attention_pairs = sum(n * n - shared * shared for n, shared in rows)
        tokens = sum(n - shared for n, shared in rows)
        facts = self.facts
        operations = 6 * facts.parameters * tokens
        operations += 6 * facts.attention_width * facts.layers * attention_pairs
        return operations / seconds / self.flops_per_s

    def mbu(
        self,
        prompt_lengths: Sequence[int],
        response_lengths: Sequence[int],
        max_num_seqs: int,
        seconds: float,
    ) -> float:
        """Returns the memory bandwidth utilization of generating responses of these lengths."""
        decode_steps = max(max(response_lengths), sum(response_lengths) / max_num_seqs)
        rows = zip(prompt_lengths, response_lengths, strict=True)
        kv_bytes = sum(n * (p + n / 2) for p, n in rows) * self.facts.kv_bytes_per_token
        weight_bytes = decode_steps * self.facts.parameter_bytes
        return (weight_bytes + kv_bytes) / seconds / self.bytes_per_s
