"""TrainWorker, the base class of the workers with a training engine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hone.config import PPOTrainerConfig, load_config
from hone.config.actor import CriticConfig
from hone.config.block import Block
from hone.config.engine import CheckpointConfig, FSDPConfig
from hone.config.reward import RewardModelConfig
from hone.config.trees import ActorRolloutRefConfig
from hone.controller import Dispatch, Worker, register
from hone.controller.contract import DEFAULT_MESH
from hone.engine.build import build_strategy
from hone.engine.contract import EngineSpec, TrainEngine
from hone.protocol import DataProto
from hone.tracking.manifest import FolderNotShared
from hone.weights.contract import StreamAddress
from hone.weights.streamed import Location, Sender, open_sender, send
from hone.workers.device import pick_device, prepare_process

SpecBuilder = Callable[[PPOTrainerConfig, Worker, torch.device], EngineSpec]


class TrainWorker(Worker):
    """A worker with one training engine: the actor, critic, reference or a reward model."""

    engine: TrainEngine

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

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        """Writes this rank's part of a checkpoint; the parent of the folder must exist."""
        parent = Path(folder).parent
        if not parent.is_dir():
            raise FolderNotShared(
                f"rank {self.rank} on {socket.gethostname()} does not see {parent}, where the checkpoint is "
                "written; every node must see the same trainer.default_local_dir"
            )
        self.engine.save(Path(folder), self.checkpoint.save_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        self.engine.load(Path(folder), self.checkpoint.load_contents)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def location(self) -> Location:
        """Returns the machine, device and address of this process, which decide the transport."""
        return Location.of_this_process(self.engine.device, self.get_master_addr_port()[0])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def token_log_probs(
        self, prompt_ids: Sequence[int], response_ids: Sequence[int]
    ) -> list[float]:
        """Returns a policy's log-probs of a response at temperature 1; every rank computes the same row."""
        ids = torch.tensor([[*prompt_ids, *response_ids]])
        prompts, responses = ids.split([len(prompt_ids), len(response_ids)], dim=1)
        columns = {"prompts": prompts, "responses": responses, "input_ids": ids}
        columns |= {"attention_mask": torch.ones_like(ids)}
        columns |= {"response_mask": torch.ones_like(responses)}
        outputs = self.engine.infer(DataProto.from_dict(columns), temperature=1.0)
        log_probs: list[float] = outputs["log_probs"][0].tolist()
        return log_probs

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def dtype(self) -> torch.dtype:
        """Returns the dtype of parameters and computation."""
        return self.engine.model_facts.dtype

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

    def named_weights(self, loads_adapters: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors for a rollout engine; adapters are merged unless the engine loads adapters."""
        if loads_adapters and self.engine.model_facts.has_adapters:
            return self.engine.named_adapter_weights()
        return self.engine.named_hf_weights()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, loads_adapters: bool) -> int:
        """Sends `named_weights` and returns the number of bytes; every rank gathers, and rank 0 sends."""
        weights = self.named_weights(loads_adapters)
        if self.rank != 0:  # takes part in gathering the shards
            for _ in weights:
                pass
            return 0
        assert self._sender is not None, "call offer_weights before send_weights"
        bucket_bytes = self.config.actor_rollout_ref.rollout.checkpoint_engine.bucket_bytes
        return send(self._sender, weights, bucket_bytes)


def full_config(config: Block) -> PPOTrainerConfig:
    """Returns the config of a run; if `config` is one block, as in verl, the other blocks have defaults."""
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
