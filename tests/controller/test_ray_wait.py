"""A wait has its phase's deadline and says how to raise it; only what completed is recorded."""

from __future__ import annotations

from typing import Any

import pytest

from hone.controller.failures import WaitTimeout, WorkerDied, WorkerProcess
from hone.event_loop import PhaseDeadlines

pytest.importorskip("ray")

from hone.controller import ray_wait


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Ray and the time, both the test's: a call is ready after `takes_s`."""
    state: dict[str, Any] = {"now": 0.0, "takes_s": 30.0, "looks": 0}

    def wait(refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        ready = state["now"] + timeout >= state["takes_s"]
        state["now"] = state["takes_s"] if ready else state["now"] + timeout
        return (refs[:1], refs[1:]) if ready else ([], refs)

    def check_alive(waiting_role: str, method: str) -> None:
        state["looks"] += 1

    monkeypatch.setattr(ray_wait.ray, "wait", wait)
    monkeypatch.setattr(ray_wait.ray, "get", lambda ref, timeout: ref.upper())
    monkeypatch.setattr(ray_wait, "check_alive", check_alive)
    monkeypatch.setattr(ray_wait.time, "monotonic", lambda: state["now"])
    return state


def waiting(deadlines: PhaseDeadlines, method: str) -> ray_wait.RefWait:
    processes = (
        WorkerProcess(0, 12, "10.0.0.1", "n", ()),
        WorkerProcess(1, 13, "10.0.0.2", "m", ()),
    )
    limit, advice = deadlines.limit_s(method), deadlines.advice(method)
    return ray_wait.RefWait("actor", method, processes, limit, advice, deadlines.record)


def test_results_are_in_rank_order_and_the_time_is_recorded(clock: dict[str, Any]) -> None:
    deadlines = PhaseDeadlines(100.0, 10.0)
    assert waiting(deadlines, "update")(["a", "b"]) == ["A", "B"]
    assert deadlines.limit_s("update") == 300.0
    assert clock["looks"] == 29  # once per second, while there was nothing


def test_a_call_beyond_its_deadline_says_how_to_raise_it_and_is_not_recorded(
    clock: dict[str, Any],
) -> None:
    deadlines = PhaseDeadlines(100.0, 10.0)
    clock["takes_s"] = 1e9
    with pytest.raises(WaitTimeout) as caught:
        waiting(deadlines, "update")(["a", "b"])
    assert clock["now"] == 100.0
    said = str(caught.value)
    assert "'actor' waited 100 s for 'update' on rank 0 (pid 12 on 10.0.0.1), rank 1" in said
    assert "trainer.phase_deadline_floor_s" in said
    assert deadlines.longest_run_s == {}


@pytest.mark.parametrize(
    ("ray_says", "reason"),
    [
        (
            "The actor died.\n\tpid: 1\nWorker exit type: SYSTEM_ERROR Worker exit detail: Worker "
            "unexpectedly exits with a connection error code 2. End of file. Some common causes "
            "include: (1) the OOM killer",
            "its process has ended: out of memory, a crash, or a signal from outside",
        ),
        ("Worker exit detail: Owner's node has crashed.", "Ray lost its node: the machine, "),
        ("Worker exit detail: Out of quota. Some common causes", "Out of quota"),
    ],
)
def test_a_death_is_told_without_the_words_of_rays_inside(ray_says: str, reason: str) -> None:
    processes = (WorkerProcess(0, 12, "10.0.0.1", "n", ()),)
    death = ray_wait.RefWait("actor", "update", processes, 1.0, "").death_error(
        0, Exception(ray_says)
    )
    assert f"died during 'update': {reason}" in str(death)
    assert "connection error" not in str(death)


def test_the_death_of_a_peer_is_told_and_not_what_it_did_to_others(
    clock: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import RayError, RayTaskError

    def get(ref: str, timeout: float) -> Any:
        if ref == "b":
            raise RayError("Worker exit detail: Worker exits with a connection error code 2.")
        raise RayTaskError("update", "Connection closed by peer", RuntimeError("closed by peer"))

    monkeypatch.setattr(ray_wait.ray, "get", get)
    with pytest.raises(WorkerDied, match="rank 1 of 'actor'"):
        waiting(PhaseDeadlines(100.0, 10.0), "update")(["a", "b"])
    with pytest.raises(RuntimeError, match="closed by peer"):
        waiting(PhaseDeadlines(100.0, 10.0), "update")(["a"])
