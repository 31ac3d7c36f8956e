"""What every worker with a training engine does: checkpoints, and its weights on their way to a rollout."""

from __future__ import annotations

from pathlib import Path

from hone.config.actor import ActorConfig
from hone.config.block import Block
from hone.config.critic import CriticConfig
from hone.config.engine import CheckpointConfig
from hone.controller import Dispatch, Worker, register
from hone.controller.modes import DATA_PARALLEL
from hone.engine.contract import Objective, TrainEngine
from hone.protocol import DataProto
from hone.weights.contract import StreamAddress
from hone.weights.streamed import Sender, Standing, open_sender, send
from hone.workers.loading import whole_config
from hone.workers.objectives import update_in_minibatches


class TrainWorker(Worker):
    """Actor, critic or reference: one training engine in this process."""

    engine: TrainEngine

    def __init__(self, config: Block) -> None:
        super().__init__()
        self.config = whole_config(config)
        self._sender: Sender | None = None

    @property
    def checkpoint(self) -> CheckpointConfig:
        """What of this role is saved and read."""
        raise NotImplementedError

    def temperature(self, asked: float | None) -> float:
        """The rollout's, unless the caller asks for another."""
        return self.config.actor_rollout_ref.rollout.temperature if asked is None else asked

    def hold(self, engine: TrainEngine) -> None:
        """Take the engine; rows are dispatched over its mesh from now on."""
        self.engine = engine
        mesh = engine.mesh
        self.register_mesh(DATA_PARALLEL, mesh.data_parallel_rank, mesh.collects)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> None:
        self.engine.save(Path(folder), self.checkpoint.save_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        self.engine.load(Path(folder), self.checkpoint.load_contents)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def version(self) -> int:
        """How many updates the weights have seen."""
        return self.engine.updates

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def standing(self) -> Standing:
        """Where this process stands, for the choice of a transport."""
        return Standing.here(self.engine.device, self.get_master_addr_port()[0])

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def offer_weights(self, transport: str, receivers: int) -> StreamAddress:
        """Open a stream for so many rollout workers; `send_weights` fills it."""
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
        """Fill the stream; every rank gathers, rank 0 sends. Of a model with LoRA only the adapters
        travel where the rollout takes them (`adapters`), else merged weights."""
        engine = self.engine
        adapted = adapters and engine.facts.has_adapters
        weights = engine.named_adapter_weights() if adapted else engine.named_hf_weights()
        if self.rank != 0:
            for _ in weights:
                pass
            return 0
        assert self._sender is not None, "offer_weights comes before send_weights"
        bucket = self.config.actor_rollout_ref.rollout.checkpoint_engine.bucket_bytes
        return send(self._sender, weights, bucket)

    def all_updates(
        self,
        data: DataProto,
        objective: Objective,
        config: ActorConfig | CriticConfig,
        step_rows: int | None,
        *,
        role: str,
    ) -> dict[str, float]:
        """Every update of one step, then the schedule moves on; the optimizer's numbers by role."""
        with self.engine.present(optimizer=True):
            metrics = update_in_minibatches(
                self.engine,
                data,
                objective,
                step_rows=step_rows,
                rows_per_update=config.sequences_per_update(),
                epochs=config.ppo_epochs,
                shuffle_seed=config.data_loader_seed if config.shuffle else None,
            )
        self.engine.advance_schedule()
        for name in ("grad_norm", "lr", "skipped_updates"):
            metrics[f"{role}/{name}"] = metrics.pop(name)
        return metrics


def measured(metrics: dict[str, float]) -> DataProto:
    """What an update returns to the loop."""
    return DataProto(batch=None, meta_info={"metrics": metrics})
