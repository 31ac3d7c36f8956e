"""The rollout gets each version of the weights once, and staleness counts publishes, not updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import pytest

from hone.config.rollout import CheckpointEngineConfig
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.trainer.ppo.publisher import Publisher

from ..runs import Run


class Group:
    """Stands for a worker group: every method returns what the table has under its name."""

    world_size = 1

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.traffic: Counter[str] = Counter()

    def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return self.answers[method.__name__]

    def call_all(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        return [self.answers[method.__name__]]


def test_staleness_counts_publishes_between_a_trajectory_s_tokens_and_the_update() -> None:
    actor = Group(version=0)
    rollout = Group(weight_transfer="shared", switch_to_actor_weights=0)
    publisher = Publisher(cast(Any, actor), cast(Any, rollout), CheckpointEngineConfig())
    for version in (0, 4, 8):  # four updates per publish
        actor.answers["version"] = version
        assert publisher.publish() == {"perf/weight_bytes": 0.0}
    versions = object_array([[4, 4], [0, 4], None])
    metrics = publisher.staleness(DataProto.from_dict({}, {"versions": versions}))
    assert metrics["training/off_policy/trajectory_staleness/max"] == 1.0
    assert metrics["training/off_policy/trajectory_staleness/min"] == 0.0
    assert metrics["training/off_policy/trajectory_spans/mean"] == pytest.approx(0.5)


def test_a_step_whose_updates_were_all_skipped_publishes_no_new_weights() -> None:
    actor, rollout = Group(version=0), Group(weight_transfer="shared", switch_to_actor_weights=0)
    publisher = Publisher(cast(Any, actor), cast(Any, rollout), CheckpointEngineConfig())
    batch = DataProto.from_dict({}, {"versions": object_array([[0, 0]])})
    publisher.publish()
    for version in (0, 0, 1):
        actor.answers["version"] = version
        publisher.publish()
        staleness = publisher.staleness(batch)
        assert staleness["training/off_policy/trajectory_staleness/max"] == 0


def test_a_synchronous_run_is_never_stale(train: Callable[..., Run]) -> None:
    run = train("trainer.total_training_steps=2")
    assert run.series("training/off_policy/trajectory_staleness/max") == [0.0, 0.0]
    assert run.series("training/off_policy/group_staleness_steps/max") == [0.0, 0.0]
