"""Sends the weights of the last update to the rollout: shared, gathered or streamed."""

from __future__ import annotations

import torch

from hone.config.rollout import CheckpointEngineConfig
from hone.controller import WorkerGroup
from hone.protocol import DataProto
from hone.trainer.ppo.metrics import spread
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
        self._numbers: dict[int, int] = {}
        self._learns_from = 0
        self._transport = ""
        if self.path == "streamed":
            self._adapters = rollout.call(RolloutWorker.takes_adapters)
            places = rollout.call_all(RolloutWorker.standing)
            source = trainer.call(ActorWorker.standing)
            self._transport = choose_transport(source, places, config.backend)

    def publish(self) -> dict[str, float]:
        """Send the new weights, all or none; return the bytes sent as a metric."""
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
        self._learns_from = self.published
        self.published += 1
        self._numbers[version] = self.published
        return {"perf/weight_bytes": float(sent)}

    def staleness(self, batch: DataProto) -> dict[str, float]:
        """Return how many publishes a trajectory's oldest token is behind the weights before this update,
        and how many publishes happened between its tokens."""
        column = batch.non_tensor_batch.get("versions", ())
        versions = [v for v in column if v is not None and len(v)]
        if not versions:
            return {}
        oldest = torch.tensor([float(self._numbers.get(min(v), 0)) for v in versions])
        newest = torch.tensor([float(self._numbers.get(max(v), 0)) for v in versions])
        staleness = spread("training/off_policy/trajectory_staleness", self._learns_from - oldest)
        return staleness | spread("training/off_policy/trajectory_spans", newest - oldest)
