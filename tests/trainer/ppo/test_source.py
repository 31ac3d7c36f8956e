"""`start` starts groups, `finish` waits for some of them, and `rows` returns their trajectories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hone.agents.contract import AgentLoopOutput
from hone.agents.groups import FinishedGroup, GroupRequest
from hone.controller.contract import Mesh
from hone.protocol import DataProto
from hone.protocol.rows import row_dicts
from hone.trainer.ppo.source import TrajectorySource
from hone.workers.rollout_worker import FinishedGroups

from ..runs import Task, opened

SAMPLING = {"temperature": 1.0, "ignore_eos": True}


@pytest.fixture
def trainer(task: Task, tmp_path: Path) -> Iterator[Any]:
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=trainer.ppo.loops:ByLength"
    with opened(task.overrides(tmp_path / "run", loop, "data.shuffle=false")) as opened_trainer:
        yield opened_trainer


def started(trainer: Any, first_number: int = 0) -> dict[int, dict[str, Any]]:
    """Starts four groups of two samples, and returns their prompts by number."""
    prompts = dict(enumerate(row_dicts(trainer.loader.next_batch()), first_number))
    trainer.source.start(prompts, [SAMPLING] * 2)
    return prompts


def tokens(batch: DataProto) -> dict[str, list[int]]:
    """Each trajectory's tokens by its name."""
    names, mask = batch.non_tensor_batch["trajectory_id"], batch.batch["response_mask"].bool()
    rows = zip(names, batch.batch["responses"], mask, strict=True)
    return {name: ids[seen].tolist() for name, ids, seen in rows}


def test_all_that_was_started_comes_in_the_order_that_is_asked_for(trainer: Any) -> None:
    started(trainer)
    started(trainer, 4)
    assert sorted(trainer.source.finish()) == list(range(8))
    batch = trainer.source.rows([7, *range(7)])
    indices = [extra["index"] for extra in batch.non_tensor_batch["extra_info"][::2]]
    assert indices == [7, *range(7)]
    assert trainer.source.finish() == []


def test_groups_that_end_first_are_finished_first_and_the_others_go_on(trainer: Any) -> None:
    started(trainer)
    assert trainer.source.finish(2) == [0, 2]  # one token each
    short = trainer.source.rows([0, 2])
    assert short.batch["responses"].shape[1] == 1  # as wide as what was taken
    started(trainer, 4)
    assert trainer.source.finish(numbers=[5]) == [5]
    assert sorted(trainer.source.finish()) == [1, 3, 4, 6, 7]


def test_groups_of_other_numbers_are_left_alone(trainer: Any) -> None:
    """Validation while groups of training are running."""
    started(trainer)
    prompts = dict(zip(range(4, 8), started(trainer, 8).values(), strict=True))
    batch = trainer.source.generate(prompts, [SAMPLING] * 3)
    assert len(batch) == 12
    assert sorted(trainer.source.finish()) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_each_sample_has_its_own_sampling(trainer: Any) -> None:
    prompts = dict(enumerate(row_dicts(trainer.loader.next_batch())))
    trainer.source.start(prompts, [SAMPLING, SAMPLING, {**SAMPLING, "temperature": 0.0}])
    trainer.source.finish()
    sampled = trainer.source.rows([*prompts], range(2))
    greedy = trainer.source.rows([*prompts], (2,))
    assert list(sampled.non_tensor_batch["sample_index"]) == [0, 1] * 4
    assert list(greedy.non_tensor_batch["sample_index"]) == [2] * 4
    alone = trainer.source.generate({9: prompts[1]}, [{**SAMPLING, "temperature": 0.0}])
    assert greedy.batch["responses"][1].tolist() == alone.batch["responses"][0].tolist()


def test_by_and_by_or_at_once_the_tokens_are_the_same(trainer: Any, task: Task) -> None:
    prompts = started(trainer)
    by_and_by: dict[str, list[int]] = {}
    while finished := trainer.source.finish(1):
        by_and_by |= tokens(trainer.source.rows(finished))
        trainer.source.release(finished)
    assert tokens(trainer.source.generate(prompts, [SAMPLING] * 2)) == by_and_by


def test_what_was_aborted_never_comes(trainer: Any) -> None:
    started(trainer)
    trainer.source.finish(1)
    trainer.source.abort([0, 1, 2, 3])
    started(trainer, 4)
    assert sorted(trainer.source.finish()) == [4, 5, 6, 7]


def test_a_group_goes_to_the_leader_with_the_fewest_running_samples() -> None:
    """One group at a time: no rank may get them all."""
    group = TwoLeaders()
    source = TrajectorySource(cast(Any, group), run_seed=1, pad_token_id=0, keep_log_probs=True)
    for index in range(3):
        source.start({index: {"uid": f"u{index}"}}, [SAMPLING] * 2)
    assert group.numbers == [[0, 2], [1]]
    group.ended = [1]
    assert source.finish(1) == [1]
    source.start({3: {"uid": "u3"}}, [SAMPLING])
    assert group.numbers == [[0, 2], [1, 3]]


def test_the_oldest_group_goes_first_and_validation_before_all() -> None:
    group = TwoLeaders()
    source = TrajectorySource(cast(Any, group), run_seed=1, pad_token_id=0, keep_log_probs=True)
    source.start({3: {"uid": "a"}, 4: {"uid": "b"}}, [SAMPLING])
    group.ended = [5]
    source.generate({5: {"uid": "c"}}, [SAMPLING] * 2)
    assert group.priorities == [3, 4, -1]


class TwoLeaders:
    """Stands for a worker group with agent loops on two ranks; `ended` has the groups that finish next."""

    world_size = 2

    def __init__(self) -> None:
        self.numbers: list[list[int]] = [[], []]
        self.ended: list[int] = []
        self.priorities: list[int] = []

    def mesh(self, name: str) -> Mesh:
        return Mesh((0, 1), (True, True))

    def call(self, method: Callable[..., Any]) -> str:
        return "streamed"

    def call_each(self, method: Callable[..., Any], requests: list[list[GroupRequest]]) -> None:
        for numbers, rank_requests in zip(self.numbers, requests, strict=True):
            numbers += [request.number for request in rank_requests]
            self.priorities += [request.priority for request in rank_requests]

    def call_all(self, method: Callable[..., Any], *arguments: Any) -> list[FinishedGroups]:
        output = AgentLoopOutput([5], [6], [1])
        groups = [FinishedGroup(number, (0, 1), (output, output)) for number in self.ended]
        return [FinishedGroups(), FinishedGroups(groups)]
