"""submit starts, take returns groups as they end; what was not taken is reissued with the same seeds.

The rollout gets each version of the weights once, and staleness counts publishes, not updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hone.config.rollout import CheckpointEngineConfig
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.trainer.ppo.source import Publisher

from ..runs import Run, Task, opened

SAMPLING = {"temperature": 1.0, "ignore_eos": True}


@pytest.fixture
def trainer(task: Task, tmp_path: Path) -> Iterator[Any]:
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=trainer.ppo.loops:ByLength"
    with opened(task.overrides(tmp_path / "run", loop, "data.shuffle=false")) as opened_trainer:
        yield opened_trainer


def submitted(trainer: Any) -> None:
    trainer.source.submit(trainer.loader.next_batch(), samples=2, sampling=SAMPLING)


def tokens(batch: DataProto) -> dict[str, list[int]]:
    """Each trajectory's tokens by its name."""
    names, mask = batch.non_tensor_batch["trajectory_id"], batch.batch["response_mask"].bool()
    rows = zip(names, batch.batch["responses"], mask, strict=True)
    return {name: ids[seen].tolist() for name, ids, seen in rows}


def test_all_that_was_submitted_comes_in_the_order_of_submission(trainer: Any) -> None:
    submitted(trainer)
    submitted(trainer)
    batch = trainer.source.take()
    assert batch.meta_info["group_numbers"] == list(range(8))
    assert [extra["index"] for extra in batch.non_tensor_batch["extra_info"][::2]] == list(range(8))
    assert trainer.source.pending == 0


def test_groups_that_end_first_are_taken_first_and_the_others_go_on(trainer: Any) -> None:
    submitted(trainer)
    short = trainer.source.take(2)
    assert short.meta_info["group_numbers"] == [0, 2]  # one token each
    assert short.batch["responses"].shape[1] == 1  # as wide as what was taken
    assert trainer.source.pending == 2
    rest = trainer.source.take()
    assert rest.meta_info["group_numbers"] == [1, 3]
    submitted(trainer)
    assert trainer.source.take().meta_info["group_numbers"] == [4, 5, 6, 7]


def test_taken_by_and_by_or_at_once_the_tokens_are_the_same(trainer: Any, task: Task) -> None:
    state = trainer.loader.state_dict()
    submitted(trainer)
    by_and_by: dict[str, list[int]] = {}
    while trainer.source.pending:
        by_and_by |= tokens(trainer.source.take(1))
    trainer.loader.load_state_dict(state)
    submitted(trainer)
    assert tokens(trainer.source.take()) == by_and_by


def test_what_was_not_taken_is_in_the_checkpoint_and_is_drawn_again(
    trainer: Any, tmp_path: Path
) -> None:
    submitted(trainer)
    trainer.source.take(2)
    state = trainer.source.state_dict()
    assert [group["samples"] for group in state] == [2, 2]
    expected = tokens(trainer.source.take())
    trainer.source.load_state_dict(state, trainer.loader)
    assert tokens(trainer.source.take()) == expected


def test_a_saved_run_takes_what_it_had_not_taken(trainer: Any, tmp_path: Path) -> None:
    from hone.trainer.ppo import checkpoint

    submitted(trainer)
    trainer.source.take(3)
    trainer.save(tmp_path)
    state = checkpoint.read_state(tmp_path, "not_taken")
    assert len(state["not_taken"]) == 1
    expected = tokens(trainer.source.take())
    trainer.source.load_state_dict(state["not_taken"], trainer.loader)
    assert tokens(trainer.source.take()) == expected


def test_what_was_aborted_never_comes(trainer: Any) -> None:
    submitted(trainer)
    trainer.source.take(1)
    trainer.source.abort()
    assert trainer.source.pending == 0
    submitted(trainer)
    assert trainer.source.take().meta_info["group_numbers"] == [4, 5, 6, 7]


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
