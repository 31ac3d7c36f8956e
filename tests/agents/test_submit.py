"""Submitted groups: pending, finished, aborted, and failed because of another group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hone.agents.contract import LOOPS, AgentLoopBase, AgentLoopOutput
from hone.agents.groups import GroupRequest
from hone.agents.runner import AgentLoopFailed, LoopRunner
from hone.protocol import DataProto
from hone.rollout.contract import RolloutError
from hone.rollout.scripted import ScriptedRollout

Rows = Callable[..., DataProto]
Gated = Callable[..., list[GroupRequest]]
Runner = Callable[..., LoopRunner]


class GatedLoop(AgentLoopBase):
    """Waits for the event of its row; `ended` lists the loops that were released."""

    begun = threading.Event()
    ended: list[str] = []  # noqa: RUF012

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        try:
            self.begun.set()
            if row.get("fails"):
                raise KeyError("no such tool")
            while not row["gate"].is_set():
                await asyncio.sleep(0.001)
            return AgentLoopOutput([5], [6], [1])
        finally:
            self.ended.append(row["uid"])


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the loop during the tests of this file."""
    monkeypatch.setitem(LOOPS.entries, "gated_for_test", GatedLoop)


@pytest.fixture
def engine(tokenizer: Any) -> ScriptedRollout:
    return ScriptedRollout(lambda p: tokenizer.decode(p), tokenizer=tokenizer)


@pytest.fixture
def gated(rows: Rows, requests: Callable[..., list[GroupRequest]]) -> Gated:
    """Returns groups whose loops wait for their events."""
    GatedLoop.begun.clear()
    GatedLoop.ended.clear()

    def build(
        uids: list[str], gates: list[threading.Event], number: int = 0, **columns: list[Any]
    ) -> list[GroupRequest]:
        data = rows(
            ["a"] * len(uids),
            uid=uids,
            gate=gates,
            agent_name=["gated_for_test"] * len(uids),
            **columns,
        )
        return requests(data, number)

    return build


def opened() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


def test_groups_come_as_they_end_and_each_once(
    runner: Runner, gated: Gated, engine: ScriptedRollout
) -> None:
    slow, loops = threading.Event(), runner(engine)
    loops.submit(gated(["a", "b", "a"], [slow, opened(), slow]))
    loops.submit(gated(["c"], [opened()], number=7))
    assert loops.pending_numbers() == [0, 1, 7]
    groups = [group for _ in range(2) for group in loops.pop_finished(1, 60.0)]
    assert {(g.number, g.row_indices) for g in groups} == {(1, (0,)), (7, (0,))}
    assert loops.pending_numbers() == [0]
    assert loops.pop_finished(1, 0.0) == []
    slow.set()
    (last,) = loops.pop_finished(None, 60.0)
    assert (last.number, last.row_indices, len(last.outputs)) == (0, (0, 1), 2)
    assert loops.pending_numbers() == []
    assert loops.pop_finished(None, 60.0) == []


def test_an_aborted_group_is_released_and_never_comes(
    runner: Runner, gated: Gated, engine: ScriptedRollout
) -> None:
    never, loops = threading.Event(), runner(engine)
    loops.submit(gated(["a", "b", "c"], [never, opened(), never]))
    (group,) = loops.pop_finished(1, 60.0)
    loops.abort([0])
    assert (group.number, loops.pending_numbers()) == (1, [2])
    loops.abort()
    assert loops.pop_finished(None, 60.0) == []
    assert sorted(GatedLoop.ended) == ["a", "b", "c"]
    loops.submit(gated(["d"], [opened()], number=3))
    assert [g.number for g in loops.pop_finished(None, 60.0)] == [3]


def test_named_groups_are_taken_alone(
    runner: Runner, gated: Gated, engine: ScriptedRollout
) -> None:
    loops = runner(engine)
    loops.submit(gated(["a", "b", "c"], [opened(), threading.Event(), opened()]))
    (group,) = loops.pop_finished(1, 60.0, [2])
    assert group.number == 2
    assert loops.num_ready([1, 2]) == 0
    assert loops.pending_numbers() == [0, 1]
    loops.close()


def test_a_failure_ends_the_loops_of_every_submission_with_one_cause(
    runner: Runner, gated: Gated, engine: ScriptedRollout
) -> None:
    never, loops = threading.Event(), runner(engine)
    loops.submit(gated(["a", "b"], [never, never]))
    loops.submit(gated(["c", "d"], [never, never], number=2, fails=[False, True]))
    with pytest.raises(AgentLoopFailed, match=r"uid=d sample 0: KeyError: 'no such tool'"):
        loops.run_until(lambda: False)
    assert sorted(GatedLoop.ended) == ["a", "b", "c", "d"]
    assert loops.pending_numbers() == []
    loops.submit(gated(["e"], [opened()], number=4))
    assert [g.number for g in loops.pop_finished(None, 60.0)] == [4]


def test_a_failure_that_comes_between_two_calls_is_told_at_the_next(
    runner: Runner, gated: Gated, engine: ScriptedRollout
) -> None:
    loops = runner(engine)
    loops.submit(gated(["a"], [opened()], fails=[True]))
    loops._wait_for_loops()
    with pytest.raises(AgentLoopFailed, match="uid=a"):
        loops.submit(gated(["b"], [opened()]))


def test_an_interrupt_of_the_waiting_caller_releases_the_loops_first(
    runner: Runner, gated: Gated, engine: ScriptedRollout
) -> None:
    loops = runner(engine)
    loops.submit(gated(["a", "b"], [threading.Event(), opened()]))

    def interrupted() -> bool:
        if loops.num_ready():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        loops.run_until(interrupted)
    assert sorted(GatedLoop.ended) == ["a", "b"]
    assert loops.pending_numbers() == []


def test_closing_releases_the_loops_and_refuses_more(
    runner: Runner, gated: Gated, engine: ScriptedRollout
) -> None:
    loops = runner(engine)
    loops.submit(gated(["a"], [threading.Event()]))
    assert GatedLoop.begun.wait(60)
    loops.close()
    assert GatedLoop.ended == ["a"]
    with pytest.raises(AgentLoopFailed, match="closed"):
        loops.submit(gated(["b"], [opened()]))


def test_a_late_loop_is_named_and_ends_the_others(
    runner: Runner, gated: Gated, engine: ScriptedRollout
) -> None:
    loops = runner(engine, "trainer.phase_deadline_floor_s=2")
    loops.start()
    loops.submit(gated(["a"], [threading.Event()]))
    with pytest.raises(AgentLoopFailed, match=r"1 of 1 agent loops .* of decoding.* uid=a"):
        loops.pop_finished(None, 60.0)


def test_the_time_between_two_calls_is_no_time_of_the_deadline(
    runner: Runner, gated: Gated, engine: ScriptedRollout
) -> None:
    """While the trainer updates, the groups in flight wait."""
    gate, loops = threading.Event(), runner(engine, "trainer.phase_deadline_floor_s=2")
    loops.submit(gated(["a"], [gate]))
    loops.run_until(lambda: True)
    assert GatedLoop.begun.wait(60)
    threading.Event().wait(3)
    assert loops.pop_finished(1, 0.0) == []
    gate.set()
    loops.run_until(lambda: False)
    assert [group.number for group in loops.pop_finished()] == [0]


class StuckEngine(ScriptedRollout):
    """A driven engine that stops at once, like one that failed."""

    def drive(self, until: Callable[[], bool]) -> None:
        """Returns without decoding."""

    def notify(self) -> None: ...

    async def generate(self, *_: Any, **__: Any) -> Any:
        raise RolloutError("decoding stopped: RuntimeError: boom")


def test_an_engine_that_stops_ends_the_loops_with_its_cause(
    runner: Runner, rows: Rows, requests: Callable[..., list[GroupRequest]]
) -> None:
    loops = runner(StuckEngine([]))
    loops.submit(requests(rows(["a", "b"])))
    with pytest.raises(AgentLoopFailed, match="decoding stopped: RuntimeError: boom"):
        loops.run_until(lambda: False)


def test_loops_that_outlive_a_stopped_engine_are_cancelled(
    runner: Runner, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.agents.runner.LOOPS_GRACE_S", 0.2)
    loops = runner(StuckEngine([]))
    loops.submit(gated(["a"], [threading.Event()]))
    assert GatedLoop.begun.wait(60)
    with pytest.raises(AgentLoopFailed, match="decoding has stopped, and 1 groups"):
        loops.run_until(lambda: False)
    assert GatedLoop.ended == ["a"]


def test_requests_have_the_priority_of_their_group(
    runner: Runner,
    rows: Rows,
    requests: Callable[..., list[GroupRequest]],
    engine: ScriptedRollout,
) -> None:
    loops = runner(engine)
    loops.submit([replace(request, priority=7) for request in requests(rows(["a"]))])
    loops.run_until(lambda: False)
    assert [request.priority for request in engine.requests] == [7]


def test_only_one_thread_is_asked_to_decode(runner: Runner) -> None:
    loops = runner(StuckEngine([]))
    loops.start()
    with pytest.raises(RuntimeError, match="the thread of `start`"):
        loops.run_until(lambda: True)
