"""The workers with a training engine: actor, reference and critic, and the base class of all such workers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from hone.config import PPOTrainerConfig, load_config
from hone.config.actor import ActorConfig, CriticConfig
from hone.config.block import Block
from hone.config.engine import CheckpointConfig, FSDPConfig
from hone.config.reward import RewardModelConfig
from hone.config.trees import ActorRolloutRefConfig
from hone.controller import Dispatch, Worker, register
from hone.controller.decorator import DEFAULT_MESH
from hone.engine.build import build_strategy
from hone.engine.contract import EngineSpec, Options, TrainEngine
from hone.models.from_config import build_tokenizer, import_external
from hone.ops.packing import shared_prompt_lengths
from hone.protocol import DataProto
from hone.tracking.manifest import FolderNotShared
from hone.weights.contract import StreamAddress
from hone.weights.streamed import Location, Sender, open_sender, send
from hone.workers.device import pick_device, prepare_process
from hone.workers.engine_specs import actor_spec, critic_spec, reference_spec
from hone.workers.objectives import PolicyObjective, ValueObjective, mean_metrics, minibatches
from hone.workers.roofline import Roofline

_GIB = 2**30

SpecBuilder = Callable[[PPOTrainerConfig, Worker, torch.device], EngineSpec]


class TrainWorker(Worker):
    """A worker with one training engine: the actor, critic, reference or a reward model."""

    engine: TrainEngine
    _rows_per_update: int
    """The number of rows in a mini-batch, over all ranks; roles that are trained set it."""

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
        self.register_mesh(DEFAULT_MESH, mesh.data_parallel_rank, mesh.collects)

    def minibatches(
        self, data: DataProto, config: ActorConfig | CriticConfig, num_step_rows: int | None
    ) -> Iterator[DataProto]:
        """Yields the mini-batches of all epochs of one step, split as the role's config says.

        `num_step_rows` is the number of rows of the step on all ranks; None splits each rank's own rows.
        """
        return minibatches(
            data,
            rows_per_update=self._rows_per_update,
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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, adapters: bool) -> int:
        """Sends the weights and returns the number of bytes; every rank gathers, and rank 0 sends.

        With `adapters`, a LoRA model sends only its adapters; without, its merged weights.
        """
        engine = self.engine
        sends_adapters = adapters and engine.facts.has_adapters
        weights = engine.named_adapter_weights() if sends_adapters else engine.named_hf_weights()
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
        self._rows_per_update = config.actor.sequences_per_update
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
        objective = self._objective if temperature is None else self._policy_objective(temperature)
        updates = []
        start_time = time.perf_counter()
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
        self._rows_per_update = config.sequences_per_update

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": self.engine.infer(data)["values"]})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto, *, num_step_rows: int | None = None) -> DataProto:
        """Runs all updates of this step; `num_step_rows` is the number of rows on all ranks."""
        config = self.config.critic
        objective = ValueObjective(config)
        updates = []
        with self.engine.on_device(optimizer=True):
            for minibatch in self.minibatches(data, config, num_step_rows):
                updates.append(self.engine.train_minibatch(minibatch, objective))
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
