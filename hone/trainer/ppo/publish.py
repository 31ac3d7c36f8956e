"""Sends the weights of the last update to the rollout: shared, gathered or streamed."""

from __future__ import annotations

import torch

from hone.config.rollout import CheckpointEngineConfig
from hone.controller import WorkerGroup
from hone.protocol import DataProto
from hone.trainer.ppo.metrics import mean_max_min
from hone.weights.streamed import choose_transport
from hone.workers.actor import ActorWorker
from hone.workers.rollout_worker import RolloutWorker


class Publisher:
    """Sends weights from the actor's workers to the rollout's workers."""

    def __init__(
        self,
        trainer: WorkerGroup[ActorWorker],
        rollout: WorkerGroup[RolloutWorker],
        config: CheckpointEngineConfig,
    ) -> None:
        self._trainer, self._rollout = trainer, rollout
        self.path = rollout.call(RolloutWorker.weight_path)
        self.published = 0
        """How many times weights were published, the unit of staleness."""
        self._number_of_version: dict[int, int] = {}
        self._previous = 0
        self._transport = ""
        if self.path == "streamed":
            self._adapters = rollout.call(RolloutWorker.takes_adapters)
            sender = trainer.call(ActorWorker.location)
            receivers = rollout.call_all(RolloutWorker.location)
            self._transport = choose_transport(sender, receivers, config.backend)

    def publish(self) -> dict[str, float]:
        """Sends the new weights, all or none; return the bytes sent as a metric."""
        trainer, rollout = self._trainer, self._rollout
        version = trainer.call(ActorWorker.version)
        if self.path == "streamed":
            receivers = rollout.world_size
            address = trainer.call(ActorWorker.offer_weights, self._transport, receivers)
            receiving = rollout.begin(RolloutWorker.receive_weights, address, version)
            try:
                sent = sum(trainer.call_all(ActorWorker.send_weights, self._adapters))
            except Exception:
                receiving.get()  # raises the receiver's error, if it is the cause
                raise
            receiving.get()
            rollout.traffic["weights"] += sent * receivers
        else:
            sent = sum(rollout.call_all(RolloutWorker.announce_weights, version))
            rollout.traffic["weights"] += sent
        self._previous = self.published
        self.published += 1
        self._number_of_version[version] = self.published
        return {"perf/weight_bytes": float(sent)}

    def staleness(self, batch: DataProto) -> dict[str, float]:
        """Returns the staleness of trajectories in publishes: how far the oldest token is behind the weights
        before this update, and how far behind the newest token."""
        column = batch.non_tensor_batch.get("versions", ())
        versions = [v for v in column if v is not None and len(v)]
        if not versions:
            return {}
        oldest = torch.tensor([float(self._number_of_version.get(min(v), 0)) for v in versions])
        newest = torch.tensor([float(self._number_of_version.get(max(v), 0)) for v in versions])
        staleness = mean_max_min(
            "training/off_policy/trajectory_staleness", self._previous - oldest
        )
        return staleness | mean_max_min("training/off_policy/trajectory_spans", newest - oldest)
