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
        actor: WorkerGroup[ActorWorker],
        rollout: WorkerGroup[RolloutWorker],
        config: CheckpointEngineConfig,
    ) -> None:
        self._actor, self._rollout = actor, rollout
        self.weight_path = rollout.call(RolloutWorker.weight_path)
        self.published = 0
        """The number of times that weights were published; staleness is measured in these."""
        self._publish_number_of_version: dict[int, int] = {}
        self._published_before_update = 0
        self._transport = ""
        if self.weight_path == "streamed":
            self._sends_adapters = rollout.call(RolloutWorker.takes_adapters)
            sender = actor.call(ActorWorker.location)
            receivers = rollout.call_all(RolloutWorker.location)
            self._transport = choose_transport(sender, receivers, config.backend)

    def publish(self) -> dict[str, float]:
        """Sends the new weights, and returns the number of bytes sent as a metric."""
        actor, rollout = self._actor, self._rollout
        version = actor.call(ActorWorker.version)
        if self.weight_path == "streamed":
            receivers = rollout.world_size
            address = actor.call(ActorWorker.offer_weights, self._transport, receivers)
            receive_call = rollout.begin(RolloutWorker.receive_weights, address, version)
            try:
                num_bytes = sum(actor.call_all(ActorWorker.send_weights, self._sends_adapters))
            except Exception:
                receive_call.get()  # raises the receiver's error, if it is the cause
                raise
            receive_call.get()
            rollout.traffic["weights"] += num_bytes * receivers
        else:
            num_bytes = sum(rollout.call_all(RolloutWorker.announce_weights, version))
            rollout.traffic["weights"] += num_bytes
        self._published_before_update = self.published
        self.published += 1
        self._publish_number_of_version[version] = self.published
        return {"perf/weight_bytes": float(num_bytes)}

    def staleness(self, batch: DataProto) -> dict[str, float]:
        """Returns how many publications the weights of each trajectory's oldest token are behind.

        They are compared with the weights before this update, and with those of the newest token.
        """
        column = batch.non_tensor_batch.get("versions", ())
        versions = [v for v in column if v is not None and len(v)]
        if not versions:
            return {}
        number_of_version = self._publish_number_of_version
        oldest_numbers = torch.tensor([float(number_of_version.get(min(v), 0)) for v in versions])
        newest_numbers = torch.tensor([float(number_of_version.get(max(v), 0)) for v in versions])
        staleness = mean_max_min(
            "training/off_policy/trajectory_staleness",
            self._published_before_update - oldest_numbers,
        )
        return staleness | mean_max_min(
            "training/off_policy/trajectory_spans", newest_numbers - oldest_numbers
        )
