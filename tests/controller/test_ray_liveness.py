"""A stopped worker, a lost control plane, a lost node, a killed loop: told in time, nothing left."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hone.controller import ClassWithInitArgs, ResourcePool
from hone.controller.failures import (
    ClusterFailed,
    NodeLost,
    WorkerDied,
    WorkerProcess,
    WorkerStopped,
)
from hone.controller.processes import GONE, MAX_UPDATE_GAP_S, STOPPED
from hone.launch import reaper

pytest.importorskip("ray")

from hone.controller import ray_liveness, ray_placement

HERE = Path(__file__).parent
WORKER = WorkerProcess(1, 4711, "10.0.0.7", "far", ())


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watch over a cluster that exists on paper: its clock, processes and probes are the test's."""
    monkeypatch.setattr(ray_liveness, "_Ping", FakePing)
    monkeypatch.setattr(ray_liveness, "RemoteNode", lambda node_id: FakeNode())
    context = SimpleNamespace(get_node_id=lambda: "here", gcs_address="10.0.0.1:6379")
    monkeypatch.setattr(ray_liveness.ray, "get_runtime_context", lambda: context)
    states: dict[int, str] = {}
    monkeypatch.setattr(ray_liveness, "process_state", lambda pid: states.get(pid, "S"))
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(ray_liveness.time, "monotonic", lambda: clock.now)
    made = ray_liveness.ClusterWatch(20.0, {"gcs_server": 7, "raylet": 8}, "/logs")
    made.clock, made.states = clock, states  # type: ignore[attr-defined]
    return made


class FakePing:
    def __init__(self) -> None:
        self.is_unanswered, self.ping_count, self.dead_nodes = False, 1, dict[str, str]()
        self.closed = False

    def close(self) -> None:
        self.closed = True


class FakeNode:
    def __init__(self) -> None:
        self.answer_count, self.states, self.ended = 0, dict[int, str](), list[int]()
        self.actor = SimpleNamespace(kill=SimpleNamespace(remote=self.ended.append))
        self.log_lines: dict[int, list[str]] = {}
        self.answers_until = 0.0

    def poll(self, logs: dict[int, tuple[str, ...]]) -> float | None:
        now = ray_liveness.time.monotonic()
        return now if now < self.answers_until else None


def look_for(watch: Any, seconds: int, each: Callable[[], None] = lambda: None) -> None:
    for _ in range(seconds):
        each()
        watch.check_alive("critic", "update_critic")
        watch.clock.now += 1.0


def test_a_stopped_worker_of_another_node_is_named_and_ended(watch: Any) -> None:
    watch.add("actor", [WORKER], 20.0)
    node = watch._nodes["far"]
    node.states = {4711: STOPPED}
    with pytest.raises(WorkerStopped) as caught:
        look_for(watch, 30)
    assert watch.clock.now == 20.0
    assert node.ended == [4711]
    said = str(caught.value)
    assert "rank 1 of 'actor' (pid 4711 on 10.0.0.7)" in said
    assert "for 20 s, while 'critic' waited for 'update_critic'" in said


def test_a_worker_that_is_busy_for_hours_is_left_alone(watch: Any) -> None:
    watch.add("actor", [WORKER], 20.0)
    node = watch._nodes["far"]
    node.states = {4711: "R"}

    def answer() -> None:
        node.answer_count += 1

    look_for(watch, 7200, answer)


def test_a_node_that_answers_no_more_is_named(watch: Any) -> None:
    watch.add("actor", [WORKER], 20.0)
    look_for(watch, 100)  # its probe starts: that is the start's deadline
    watch._nodes["far"].answer_count = 1
    watch._nodes["far"].log_lines = {4711: ["its last words"]}
    with pytest.raises(NodeLost) as caught:
        look_for(watch, 30)
    assert not watch.failed, "Ray itself works: workers of other nodes can be ended"
    said = str(caught.value)
    assert said.startswith(
        "node 10.0.0.7 (id far) was lost with rank 1 of 'actor', while 'critic' waited for "
        "'update_critic': it has not answered for 20 s\n"
    )
    assert "last log lines of rank 1 of 'actor' (pid 4711):\n  | its last words\n" in said
    assert "far" in ray_liveness.lost_node_ids


def test_a_node_that_ray_calls_dead_is_named_with_all_its_ranks_and_roles(watch: Any) -> None:
    watch.add(
        "actor", [WorkerProcess(rank, 50 + rank, "10.0.0.7", "far", ()) for rank in (2, 3)], 20.0
    )
    watch.add(
        "rm",
        [
            WorkerProcess(0, 60, "10.0.0.7", "far", ()),
            WorkerProcess(1, 61, "10.0.0.8", "other", ()),
        ],
        20,
    )
    watch.ping.dead_nodes = {"far": "Ray reports: missed heartbeats"}
    with pytest.raises(
        NodeLost, match=r"ranks 2 and 3 of 'actor' and rank 0 of 'rm', .*heartbeats"
    ):
        look_for(watch, 1)


def test_a_worker_lost_with_its_node_is_told_from_one_that_died_alone(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch.add("actor", [WORKER], 20.0)
    node, dead = watch._nodes["far"], dict[str, str]()
    monkeypatch.setattr(
        ray_liveness,
        "raylet_problem",
        lambda node: dead.get(node) if watch.clock.now > 14 else None,
    )
    monkeypatch.setattr(
        ray_liveness.time, "sleep", lambda s: setattr(watch.clock, "now", watch.clock.now + s)
    )
    node.answers_until = 8.0
    watch.raise_if_node_lost("far", "critic", "update_critic")  # it still answers after 5 s
    watch.clock.now, node.answers_until = 0.0, 3.0  # as a node does whose raylet was killed
    dead["far"] = "Ray reports: missed heartbeats"
    with pytest.raises(NodeLost, match="missed heartbeats"):
        watch.raise_if_node_lost("far", "critic", "update_critic")
    assert 14 < watch.clock.now < 15
    dead.clear()
    with pytest.raises(NodeLost, match="has not answered for 22 s"):
        watch.raise_if_node_lost("far", "critic", "update_critic")


def test_the_raylet_of_this_machine_is_named_as_the_cause(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_liveness, "raylet_problem", lambda node: "refused")
    with pytest.raises(ClusterFailed, match=r"the Ray node of this machine was lost \(refused\)"):
        watch.raise_if_node_lost("here", "critic", "update_critic")


def test_a_failed_call_is_laid_to_a_process_that_is_gone(watch: Any) -> None:
    watch.add("rollout", [WorkerProcess(0, 99, "10.0.0.1", "here", ())], 20.0)
    watch.raise_if_any_lost("critic", "update_critic")
    watch.states[99] = GONE
    with pytest.raises(WorkerDied, match="rank 0 of 'rollout'"):
        watch.raise_if_any_lost("critic", "update_critic")


def test_a_control_plane_that_answers_no_more_is_named(watch: Any) -> None:
    watch.ping.is_unanswered = True

    def next_ping() -> None:
        watch.ping.ping_count += 1

    look_for(watch, 100, next_ping)  # each one was answered, the next is on its way
    with pytest.raises(ClusterFailed, match=r"control plane \(the GCS at 10.0.0.1:6379\).*20 s"):
        look_for(watch, 30)


@pytest.mark.parametrize(
    "question",
    [
        lambda: ray_liveness.raylet_problem("far"),
        ray_placement.live_nodes,
        lambda: ray_placement.check_pools_fit([ResourcePool([1])]),
    ],
)
def test_a_question_that_the_control_plane_does_not_answer_has_a_deadline(
    watch: Any, monkeypatch: pytest.MonkeyPatch, question: Callable[[], Any]
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(ray_liveness, "_watch", watch)
    monkeypatch.setattr(ray_liveness.ray, "nodes", lambda: hangs.wait(60) and [])
    monkeypatch.setattr(ray_placement, "available_resources_per_node", dict)
    watch.add("actor", (), 0.05)
    with pytest.raises(ClusterFailed, match=r"control plane \(the GCS at 10.0.0.1:6379\).*0.05 s"):
        question()
    assert ray_liveness.cluster_failed()
    hangs.set()


@pytest.mark.parametrize(("pid", "part"), [(7, "control plane"), (8, "node manager")])
@pytest.mark.parametrize(("state", "seconds"), [(GONE, 0), ("Z", 0), (STOPPED, 20)])
def test_a_process_of_our_ray_that_ended_or_is_stopped_is_named(
    watch: Any, pid: int, part: str, state: str, seconds: int
) -> None:
    watch.states[pid] = state
    with pytest.raises(ClusterFailed, match=f"Ray's {part} .*pid {pid}.*see /logs"):
        look_for(watch, 30)
    assert watch.clock.now == seconds


def test_another_cluster_gets_a_watch_of_its_own(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_liveness, "_watch", watch)
    ray_liveness.watch_workers("actor", (), 20.0)
    assert ray_liveness._watch is watch
    watch.local_node_id = "a node of a cluster that is gone"
    ray_liveness.watch_workers("actor", (), 20.0)
    assert ray_liveness._watch is not watch
    assert watch.ping.closed


def test_workers_may_start_and_end_while_another_thread_waits(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(ray_liveness.ray, "kill", killed.append)
    workers = [dataclasses.replace(WORKER, pid=pid, node_id=f"far {pid}") for pid in range(3)]
    watch.add("actor", workers[:2], 20.0)
    probes = [node.actor for node in watch._nodes.values()]

    def start_and_end_workers(logs: dict[int, tuple[str, ...]]) -> None:
        watch.add("critic", workers[2:], 20.0)
        watch.remove(workers[:1])

    for node in watch._nodes.values():
        node.poll = start_and_end_workers
    watch.check_alive("trainer", "step")
    assert {pid for _, pid in watch._workers} == {1, 2}
    assert killed == probes[:1]


def test_failures_survive_pickling() -> None:
    stopped = WorkerStopped("actor", WORKER, "critic", "step", 20.0)
    lost = ClusterFailed("it has ended", "critic", "step", "do x")
    node = NodeLost("id", "10.0.0.7", [("actor", WORKER, ["line"])], "critic", "step", "why")
    for error in (stopped, lost, node):
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


# -- with a real cluster ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_worker_that_holds_its_interpreter_is_busy_and_a_stopped_one_is_not() -> None:
    from toy_workers import Toy

    from hone.controller.ray import RayWorkerGroup

    # Longer than MAX_UPDATE_GAP_S: if the whole machine is stopped, nothing else counts as stopped.
    deadline_s = MAX_UPDATE_GAP_S + 0.5
    group = RayWorkerGroup(
        ResourcePool([2]), ClassWithInitArgs(Toy, 1.0), "toy", 250.0, liveness_deadline_s=deadline_s
    )
    group.hold_interpreter(deadline_s + 1.0)
    pid = group.whereabouts()[1]["pid"]
    stop = threading.Timer(1.0, os.kill, (pid, signal.SIGSTOP))
    stop.start()
    with pytest.raises(WorkerStopped, match=rf"rank 1 of 'toy' \(pid {pid} on 127.0.0.1\).*'nap'"):
        group.nap(600)
    stop.join()
    group.shutdown()
    _until(lambda: not os.path.exists(f"/proc/{pid}"), "the stopped process ends")


LOOP = """
import os, signal, sys, threading, time
from toy_workers import Toy
from hone.controller import ClassWithInitArgs, ResourcePool
from hone.controller import ray_liveness, ray_start
from hone.controller.ray import RayWorkerGroup
ray_start.start_ray({"num_cpus": 1, "log_to_driver": False, "object_store_memory": 100_000_000})
group = RayWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Toy, 1.0), "toy")
worker = group.whereabouts()[0]["pid"]
print(ray_start._own_cluster.mark, flush=True)
victim, signal_name = sys.argv[1:3]
pid = {**ray_liveness._watch._ray_pids, "worker": worker, "loop": os.getpid()}[victim]
if victim == "loop":
    os.kill(worker, signal.SIGSTOP)
os.kill(pid, getattr(signal, signal_name))
try:
    group.nap(600)
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
finally:
    group.shutdown()
    ray_start.stop_ray()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("victim", "sentence"),
    [
        ("gcs_server", "ClusterFailed: Ray's control plane (gcs_server, pid "),
        ("raylet", "ClusterFailed: Ray's node manager (raylet, pid "),
        ("loop", ""),
    ],
)
def test_what_is_killed_is_told_and_nothing_is_left(victim: str, sentence: str) -> None:
    loop = subprocess.Popen(
        [sys.executable, "-c", LOOP, victim, "SIGKILL"],
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = loop.communicate(timeout=300)
    mark, _, said = output.partition("\n")
    assert mark, errors[-3000:]
    assert loop.returncode == (-signal.SIGKILL if victim == "loop" else 0), errors[-3000:]
    assert said.startswith(sentence), output + errors
    _until(lambda: reaper.marked_pids(mark) == [], "all processes end")


def _until(condition: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends, f"waited 60 s, and not: {what}"
        time.sleep(0.1)
