"""submit starts, take returns groups as they end; what was not taken is reissued with the same seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from hone.agents.contract import AgentLoopOutput
from hone.agents.groups import FinishedGroup, GroupRequest
from hone.controller.contract import Mesh
from hone.data.prompts import collate_fn
from hone.protocol import DataProto
from hone.trainer.ppo.source import TrajectorySource
from hone.workers.rollout_worker import FinishedGroups

from ..runs import Task, opened

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


def test_a_group_goes_to_the_leader_with_the_fewest_running_samples() -> None:
    """One group at a time: no rank may get them all."""
    group = TwoLeaders()
    source = TrajectorySource(cast(Any, group), run_seed=1, pad_token_id=0, keep_log_probs=True)
    for index in range(3):
        prompts = collate_fn([{"uid": f"u{index}"}])
        source.submit(prompts, samples=2, sampling=SAMPLING)
    assert group.numbers == [[0, 2], [1]]
    group.ended = [1]
    source.take(1)
    source.submit(collate_fn([{"uid": "u3"}]), samples=1, sampling=SAMPLING)
    assert group.numbers == [[0, 2], [1, 3]]


class TwoLeaders:
    """Stands for a worker group with agent loops on two ranks; `ended` has the groups that finish next."""

    world_size = 2

    def __init__(self) -> None:
        self.numbers: list[list[int]] = [[], []]
        self.ended: list[int] = []

    def mesh(self, name: str) -> Mesh:
        return Mesh((0, 1), (True, True))

    def call(self, method: Callable[..., Any]) -> str:
        return "streamed"

    def call_each(self, method: Callable[..., Any], requests: list[list[GroupRequest]]) -> None:
        for numbers, rank_requests in zip(self.numbers, requests, strict=True):
            numbers += [request.number for request in rank_requests]

    def call_all(self, method: Callable[..., Any], *arguments: Any) -> list[FinishedGroups]:
        output = AgentLoopOutput([5], [6], [1])
        groups = [FinishedGroup(number, (0, 1), (output, output)) for number in self.ended]
        return [FinishedGroups(), FinishedGroups(groups)]
