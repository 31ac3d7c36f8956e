"""Publishing: the rollout gets the weights of the last update, by whichever way lies between them."""

from __future__ import annotations

from hone.config.rollout import CheckpointEngineConfig
from hone.controller import WorkerGroup
from hone.weights.streamed import transport_between


class Publisher:
    """Between a trainer's workers and a rollout's."""

    def __init__(
        self, trainer: WorkerGroup, rollout: WorkerGroup, config: CheckpointEngineConfig
    ) -> None:
        self._trainer, self._rollout = trainer, rollout
        self.path: str = rollout.weight_path()
        self.published = 0
        """How many times the rollout got weights; staleness is counted in these."""
        self._numbers: dict[int, int] = {}
        self._transport = ""
        if self.path == "streamed":
            places = rollout.standing()
            self._transport = transport_between(trainer.standing(), places, config.backend)

    def publish(self) -> dict[str, float]:
        """New weights, whole or not at all; what travelled."""
        version: int = self._trainer.version()
        sent = 0
        if self.path == "streamed":
            address = self._trainer.offer_weights(self._transport, self._rollout.world_size)
            receiving = self._rollout.receive_weights(address, version)
            try:
                sent = sum(self._trainer.send_weights())
            except Exception:
                receiving.get()  # where a receiver failed, its error is the cause
                raise
            receiving.get()
        else:
            sent = sum(self._rollout.announce_weights(version))
        self.published += 1
        self._numbers[version] = self.published
        return {"perf/weight_bytes": float(sent)}

    def staleness_of(self, version: int) -> int:
        """How many times weights were published since those of `version` were."""
        return self.published - self._numbers.get(version, self.published)
