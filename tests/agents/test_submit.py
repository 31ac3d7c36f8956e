"""Submitted groups: pending, finished, aborted, and failed because of another group."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hone.agents.contract import LOOPS, AgentLoopBase, AgentLoopOutput
from hone.agents.runner import AgentLoopFailed, LoopRunner
from hone.protocol import DataProto
from hone.rollout.contract import RolloutError
from hone.rollout.scripted import ScriptedRollout

Rows = Callable[..., DataProto]
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
def gated(rows: Rows) -> Callable[..., DataProto]:
    """Returns rows whose loops wait for their events."""
    GatedLoop.begun.clear()
    GatedLoop.ended.clear()

    def build(uids: list[str], gates: list[threading.Event], **columns: list[Any]) -> DataProto:
        return rows(
            ["a"] * len(uids),
            uid=uids,
            gate=gates,
            agent_name=["gated_for_test"] * len(uids),
            **columns,
        )

    return build


def opened() -> threading.Event:
    gate = threading.Event()
    gate.set()
    return gate


def test_groups_come_as_they_end_and_each_once(
    runner: Runner, gated: Callable[..., DataProto], engine: ScriptedRollout
) -> None:
    slow, loops = threading.Event(), runner(engine)
    first = loops.submit(gated(["a", "b", "a"], [slow, opened(), slow]))
    second = loops.submit(gated(["c"], [opened()]))
    assert loops.pending_uids() == ["a", "b", "c"]
    groups = [group for _ in range(2) for group in loops.pop_finished(1, 60.0)]
    assert {(g.uid, g.submission, g.row_indices) for g in groups} == {
        ("b", first, (1,)),
        ("c", second, (0,)),
    }
    assert loops.pending_uids() == ["a"]
    assert loops.pop_finished(1, 0.0) == []
    slow.set()
    (last,) = loops.pop_finished(None, 60.0)
    assert (last.uid, last.row_indices, len(last.outputs)) == ("a", (0, 2), 2)
    assert loops.pending_uids() == []
    assert loops.pop_finished(None, 60.0) == []


def test_an_aborted_group_is_released_and_never_comes(
    runner: Runner, gated: Callable[..., DataProto], engine: ScriptedRollout
) -> None:
    never, loops = threading.Event(), runner(engine)
    loops.submit(gated(["a", "b", "c"], [never, opened(), never]))
    (group,) = loops.pop_finished(1, 60.0)
    loops.abort(["a"])
    assert (group.uid, loops.pending_uids()) == ("b", ["c"])
    loops.abort()
    assert loops.pop_finished(None, 60.0) == []
    assert sorted(GatedLoop.ended) == ["a", "b", "c"]
    loops.submit(gated(["d"], [opened()]))
    assert [g.uid for g in loops.pop_finished(None, 60.0)] == ["d"]


def test_a_failure_ends_the_loops_of_every_submission_with_one_cause(
    runner: Runner, gated: Callable[..., DataProto], engine: ScriptedRollout
) -> None:
    never, loops = threading.Event(), runner(engine)
    loops.submit(gated(["a", "b"], [never, never]))
    loops.submit(gated(["c", "d"], [never, never], fails=[False, True]))
    with pytest.raises(AgentLoopFailed, match=r"uid=d sample 0: KeyError: 'no such tool'"):
        loops.run_until(lambda: False)
    assert sorted(GatedLoop.ended) == ["a", "b", "c", "d"]
    assert loops.pending_uids() == []
    loops.submit(gated(["e"], [opened()]))
    assert [g.uid for g in loops.pop_finished(None, 60.0)] == ["e"]


def test_a_failure_that_comes_between_two_calls_is_told_at_the_next(
    runner: Runner, gated: Callable[..., DataProto], engine: ScriptedRollout
) -> None:
    loops = runner(engine)
    loops.submit(gated(["a"], [opened()], fails=[True]))
    loops._wait_for_loops()
    with pytest.raises(AgentLoopFailed, match="uid=a"):
        loops.submit(gated(["b"], [opened()]))


def test_an_interrupt_of_the_waiting_caller_releases_the_loops_first(
    runner: Runner, gated: Callable[..., DataProto], engine: ScriptedRollout
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
    assert loops.pending_uids() == []


def test_closing_releases_the_loops_and_refuses_more(
    runner: Runner, gated: Callable[..., DataProto], engine: ScriptedRollout
) -> None:
    loops = runner(engine)
    loops.submit(gated(["a"], [threading.Event()]))
    assert GatedLoop.begun.wait(60)
    loops.close()
    assert GatedLoop.ended == ["a"]
    with pytest.raises(AgentLoopFailed, match="closed"):
        loops.submit(gated(["b"], [opened()]))


def test_a_late_submission_is_named_and_ends_the_others(
    runner: Runner, gated: Callable[..., DataProto], engine: ScriptedRollout
) -> None:
    loops = runner(engine, "trainer.phase_deadline_floor_s=2")
    loops.submit(gated(["a"], [threading.Event()]))
    with pytest.raises(AgentLoopFailed, match=r"1 of 1 agent loops .* uid=a"):
        loops.pop_finished(None, 60.0)


class StuckEngine(ScriptedRollout):
    """A driven engine that stops at once, like one that failed."""

    def drive(self, until: Callable[[], bool]) -> None:
        """Returns without decoding."""

    def notify(self) -> None: ...

    async def generate(self, *_: Any, **__: Any) -> Any:
        raise RolloutError("decoding stopped: RuntimeError: boom")


def test_an_engine_that_stops_ends_the_loops_with_its_cause(runner: Runner, rows: Rows) -> None:
    loops = runner(StuckEngine([]))
    loops.submit(rows(["a", "b"]))
    with pytest.raises(AgentLoopFailed, match="decoding stopped: RuntimeError: boom"):
        loops.run_until(lambda: False)


def test_loops_that_outlive_a_stopped_engine_are_cancelled(
    runner: Runner, gated: Callable[..., DataProto], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.agents.runner.LOOPS_GRACE_S", 0.2)
    loops = runner(StuckEngine([]))
    loops.submit(gated(["a"], [threading.Event()]))
    assert GatedLoop.begun.wait(60)
    with pytest.raises(AgentLoopFailed, match="decoding has stopped, and 1 groups"):
        loops.run_until(lambda: False)
    assert GatedLoop.ended == ["a"]


def test_only_one_thread_is_asked_to_decode(runner: Runner) -> None:
    loops = runner(StuckEngine([]))
    loops.start()
    with pytest.raises(RuntimeError, match="the thread of `start`"):
        loops.run_until(lambda: True)
