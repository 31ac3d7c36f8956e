"""The workers with a training engine: actor, reference and critic, and the base class of all such workers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from hone.config import PPOTrainerConfig, load_config
from hone.config.actor import ActorConfig, CriticConfig
from hone.config.block import Block
from hone.config.engine import CheckpointConfig, FSDPConfig
from hone.config.reward import RewardModelConfig
from hone.config.trees import ActorRolloutRefConfig
from hone.controller import Dispatch, Worker, register
from hone.controller.contract import DEFAULT_MESH
from hone.engine.build import build_strategy
from hone.engine.contract import EngineSpec, ModelFacts, Options, TrainEngine
from hone.models.from_config import build_tokenizer, import_external
from hone.ops.rows import shared_prompt_lengths
from hone.protocol import DataProto
from hone.tracking.manifest import FolderNotShared
from hone.weights.contract import StreamAddress
from hone.weights.streamed import Location, Sender, open_sender, send
from hone.workers.device import pick_device, prepare_process
from hone.workers.engine_specs import actor_spec, critic_spec, reference_spec
from hone.workers.objectives import PolicyObjective, ValueObjective, mean_metrics, minibatches

_GIB = 2**30

SpecBuilder = Callable[[PPOTrainerConfig, Worker, torch.device], EngineSpec]


_CEILINGS_BY_DEVICE = {
    "H200": (790e12, 4.25e12),
    "H100": (790e12, 3.0e12),
    "A100": (280e12, 1.7e12),
    "L40S": (300e12, 0.75e12),
    "4090": (150e12, 0.9e12),
}
"""Dense bf16 FLOP/s and bytes/s that large kernels reach in practice, by part of the device name."""


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


class TrainWorker(Worker):
    """A worker with one training engine: the actor, critic, reference or a reward model."""

    engine: TrainEngine
    rows_per_update: int
    """The rows of one mini-batch over all ranks; unset for a model that is not trained."""

    def __init__(self, config: Block) -> None:
        super().__init__()
        self.config = full_config(config)
        self._sender: Sender | None = None

    @property
    def checkpoint(self) -> CheckpointConfig:
        """The checkpoint settings of this role."""
        raise NotImplementedError

    def temperature(self, override: float | None) -> float:
        """Returns `override`, or the rollout's temperature if `override` is None."""
        return self.config.actor_rollout_ref.rollout.temperature if override is None else override

    def build_engine(
        self, strategy: str, build_spec: SpecBuilder, *fsdp_configs: FSDPConfig
    ) -> None:
        """Builds the engine on this rank's device and registers its mesh for dispatch.

        Makes this process deterministic if one of `fsdp_configs` has `full_determinism`.
        """
        device = pick_device(self.config.trainer.device, self.local_rank)
        timeout_s = self.config.actor_rollout_ref.nccl_timeout
        prepare_process(device, self.world_size, timeout_s, fsdp_configs)
        self.engine = build_strategy(strategy, build_spec(self.config, self, device))
        mesh = self.engine.mesh
        self.register_mesh(DEFAULT_MESH, mesh.data_parallel_rank, mesh.is_collector)

    def minibatches(
        self, data: DataProto, config: ActorConfig | CriticConfig, num_step_rows: int | None
    ) -> Iterator[DataProto]:
        """Returns the mini-batches of all epochs of one step, split as the role's config says.

        `num_step_rows` is the number of rows of the step on all ranks; None splits each rank's own rows.
        """
        return minibatches(
            data,
            rows_per_update=self.rows_per_update,
            epochs=config.ppo_epochs,
            shuffle_seed=config.data_loader_seed if config.shuffle else None,
            num_step_rows=num_step_rows,
            ranks=self.engine.mesh.data_parallel_size,
        )

    def end_updates(self, role: str, updates: list[dict[str, float]]) -> dict[str, float]:
        """Advances the learning-rate schedule; returns the mean metrics of the updates.

        The metrics of the optimizer get the prefix `role/`.
        """
        self.engine.advance_schedule()
        metrics = mean_metrics(updates)
        for name in ("grad_norm", "lr", "skipped_updates"):
            metrics[f"{role}/{name}"] = metrics.pop(name)
        return metrics

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Writes this rank's part of a checkpoint; the parent of the folder must exist."""
        if not (parent := Path(folder).parent).is_dir():
            raise FolderNotShared(
                f"rank {self.rank} on {socket.gethostname()} does not see {parent}, where the checkpoint is "
                "written; every node must see the same trainer.default_local_dir"
            )
        self.engine.save(Path(folder), self.checkpoint.save_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        self.engine.load(Path(folder), self.checkpoint.load_contents)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def version(self) -> int:
        """Returns the version of the weights, which is the number of updates so far."""
        return self.engine.updates

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def location(self) -> Location:
        """Returns the machine, device and address of this process, which decide the transport."""
        return Location.of_this_process(self.engine.device, self.get_master_addr_port()[0])

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def offer_weights(self, transport: str, receivers: int) -> StreamAddress:
        """Opens a stream to `receivers` rollout workers; `send_weights` fills it."""
        config = self.config.actor_rollout_ref
        self._sender = open_sender(
            transport,
            receivers,
            bucket_bytes=config.rollout.checkpoint_engine.bucket_bytes,
            device=self.engine.device,
            host=self.get_master_addr_port()[0],
            timeout_s=config.nccl_timeout,
        )
        return self._sender.address

    def named_weights(self, adapters: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors for a rollout engine: the adapters of a LoRA model, or its merged weights.

        Only an engine that loads `adapters` gets adapters.
        """
        if adapters and self.engine.facts.has_adapters:
            return self.engine.named_adapter_weights()
        return self.engine.named_hf_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, adapters: bool) -> int:
        """Sends `named_weights` and returns the number of bytes; every rank gathers, and rank 0 sends."""
        weights = self.named_weights(adapters)
        if self.rank != 0:
            for _ in weights:
                pass
            return 0
        assert self._sender is not None, "call offer_weights before send_weights"
        bucket_bytes = self.config.actor_rollout_ref.rollout.checkpoint_engine.bucket_bytes
        return send(self._sender, weights, bucket_bytes)


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
        self.rows_per_update = config.actor.sequences_per_update
        self._objective = self._policy_objective(None)
        self._roofline = Roofline.for_device(self.engine.facts, self.engine.device)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(
        self,
        data: DataProto,
        *,
        with_sum_pi_squared: bool = False,
        temperature: float | None = None,
    ) -> DataProto:
        """Computes the log-prob and entropy of each token and, if `with_sum_pi_squared` is set, Σπ²."""
        options: Options = {"temperature": self.temperature(temperature), "with_entropy": True}
        options["with_sum_pi_squared"] = with_sum_pi_squared
        if self.config.actor_rollout_ref.actor.router_replay.mode == "R2":
            options["with_routing"] = True
        outputs = self.engine.infer(data, **options)
        names = {"log_probs": "old_log_probs", "entropy": "entropys"}
        return DataProto.from_dict({names.get(name, name): v for name, v in outputs.items()})

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
        config, start_time = self.config.actor_rollout_ref.actor, time.perf_counter()
        objective = self._objective if temperature is None else self._policy_objective(temperature)
        updates = []
        with self.engine.on_device(optimizer=True):
            for minibatch in self.minibatches(data, config, num_step_rows):
                updates.append(self.engine.train_minibatch(minibatch, objective))
        metrics = self.end_updates("actor", updates)
        metrics |= self._device_metrics(data, time.perf_counter() - start_time)
        return DataProto(meta_info={"metrics": metrics})

    def _policy_objective(self, temperature: float | None) -> PolicyObjective:
        return PolicyObjective(
            self.config.actor_rollout_ref.actor,
            temperature=self.temperature(temperature),
            correction=self.config.algorithm.rollout_correction,
        )

    def _device_metrics(self, data: DataProto, seconds: float) -> dict[str, float]:
        """Returns the MFU of the updates and the peak memory."""
        device = self.engine.device
        if device.type != "cuda":
            return {}
        metrics = {
            "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / _GIB,
            "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / _GIB,
        }
        if self._roofline is not None:
            mask = data.batch["attention_mask"]
            shared_lengths = shared_prompt_lengths(data.batch["prompts"], mask)
            mfu = self._roofline.mfu(mask.sum(1).tolist(), shared_lengths, seconds)
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


class CriticWorker(TrainWorker):
    """The value model under training."""

    @property
    def checkpoint(self) -> CheckpointConfig:
        return self.config.critic.checkpoint

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        config = self.config.critic
        import_external(config.model.external_lib)
        self.build_engine(config.strategy, critic_spec, config.model.fsdp_config)
        self.rows_per_update = config.sequences_per_update

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": self.engine.infer(data)["values"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto, *, num_step_rows: int | None = None) -> DataProto:
        """Runs all updates of this step; `num_step_rows` is the number of rows on all ranks."""
        config, objective = self.config.critic, ValueObjective(self.config.critic)
        with self.engine.on_device(optimizer=True):
            batches = self.minibatches(data, config, num_step_rows)
            updates = [self.engine.train_minibatch(batch, objective) for batch in batches]
        return DataProto(meta_info={"metrics": self.end_updates("critic", updates)})


def full_config(config: Block) -> PPOTrainerConfig:
    """Returns the config of a run; verl passes one block, and the other blocks then have their defaults."""
    if isinstance(config, PPOTrainerConfig):
        return config
    defaults: PPOTrainerConfig = load_config()
    if isinstance(config, ActorRolloutRefConfig):
        return replace(defaults, actor_rollout_ref=config)
    if isinstance(config, CriticConfig):
        return replace(defaults, critic=config)
    if isinstance(config, RewardModelConfig):
        return replace(defaults, reward_model=config)
    raise TypeError(
        f"a worker takes a run's config, or its actor_rollout_ref, critic or reward_model, not a "
        f"{type(config).__name__}"
    )
