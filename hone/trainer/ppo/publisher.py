"""Sends the actor's weights to the rollout, and measures how old the weights of a trajectory are."""

from __future__ import annotations

import torch

from hone.config.rollout import CheckpointEngineConfig
from hone.controller import WorkerGroup
from hone.protocol import DataProto
from hone.trainer.ppo.publish_probe import PublishProbe
from hone.trainer.ppo.source import mean_max_min
from hone.weights.streamed import choose_transport
from hone.workers.actor import ActorWorker
from hone.workers.rollout_worker import RolloutWorker


class Publisher:
    """Sends weights from the actor's workers to the rollout's workers: shared, gathered or streamed."""

    def __init__(
        self,
        actor: WorkerGroup[ActorWorker],
        rollout: WorkerGroup[RolloutWorker],
        config: CheckpointEngineConfig,
        probe: PublishProbe | None = None,
    ) -> None:
        self._actor, self._rollout, self._probe = actor, rollout, probe
        self.weight_transfer = rollout.call(RolloutWorker.weight_transfer)
        self.published = 0
        """How often new weights were published; staleness counts these publications."""
        self._publish_number_of_version: dict[int, int] = {}
        self._published_before_update = 0
        self._transport = ""
        if self.weight_transfer == "streamed":
            self._sends_adapters = rollout.call(RolloutWorker.takes_adapters)
            sender = actor.call(ActorWorker.location)
            receivers = rollout.call_all(RolloutWorker.location)
            self._transport = choose_transport(sender, receivers, config.backend)

    def publish(self) -> dict[str, float]:
        """Sends the new weights; returns the number of bytes sent, and the metrics of the probe."""
        actor, rollout, receivers = self._actor, self._rollout, 1
        version = actor.call(ActorWorker.version)
        if self.weight_transfer == "streamed":
            receivers = rollout.world_size
            address = actor.call(ActorWorker.offer_weights, self._transport, receivers)
            receive_call = rollout.begin(RolloutWorker.receive_weights, address, version)
            try:
                num_bytes = sum(actor.call_all(ActorWorker.send_weights, self._sends_adapters))
            except Exception:
                receive_call.get()  # raises the receiver's error, if there is one
                raise
            receive_call.get()
        else:
            num_bytes = sum(rollout.call_all(RolloutWorker.switch_to_actor_weights, version))
        rollout.traffic["weights"] += num_bytes * receivers
        self._published_before_update = self.published
        # If all updates were skipped, the version is unchanged, and staleness counts no new publication.
        if version not in self._publish_number_of_version:
            self.published += 1
            self._publish_number_of_version[version] = self.published
        metrics = {"perf/weight_bytes": float(num_bytes)}
        return metrics if self._probe is None else metrics | self._probe.after_publish(version)

    def staleness(self, batch: DataProto) -> dict[str, float]:
        """Returns metrics of the staleness and the span of each trajectory.

        Staleness is the number of publications from the weights that sampled the oldest token to the weights
        before this update. Span is the number from the weights of the oldest token to those of the newest.
        """
        column = batch.non_tensor_batch.get("versions", ())
        versions = [v for v in column if v is not None and len(v)]
        if not versions:
            return {}
        number_of_version = self._publish_number_of_version
        oldest = torch.tensor([number_of_version.get(min(v), 0) for v in versions])
        newest = torch.tensor([number_of_version.get(max(v), 0) for v in versions])
        prefix, staleness = "training/off_policy", self._published_before_update - oldest
        return {
            **mean_max_min(f"{prefix}/trajectory_staleness", staleness),
            **mean_max_min(f"{prefix}/trajectory_spans", newest - oldest),
        }
