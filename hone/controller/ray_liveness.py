"""Checks that worker processes, their nodes and Ray itself are alive while the trainer waits.

Local processes are checked in /proc, remote ones by a probe actor on their node, and Ray's control plane
by a call. A busy worker counts as alive; the phase deadline limits work that never ends.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hone.config.trainer import TrainerConfig
from hone.controller.failures import ClusterFailed, NodeLost, Seat, WorkerDied, WorkerStopped
from hone.controller.processes import GONE, STOPPED, ZOMBIE, Silence, last_lines, process_state
from hone.types import Row

T = TypeVar("T")

PING_EVERY_S = 2.0
LOG_DEADLINE_S = 15.0
CONNECT_DEADLINE_S = 5.0
LAST_ANSWER_S = 5.0
"""The processes of a node whose raylet has died answer for less than this."""
ANSWER_DEADLINE_S = 5.0
NODE_DEADLINE_S = 22.0
"""Ray's health checks call a lost node dead within some 15 s."""
PARTS = {"gcs_server": "Ray's control plane", "raylet": "Ray's node manager"}


class _NodeProbe:
    """Reads processes of its node; a separate actor, because busy workers cannot answer."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def read(
        self, logs: Mapping[int, Sequence[str]]
    ) -> tuple[dict[int, str], dict[int, list[str]]]:
        """Returns the state of each process, and the last lines of each log that has grown since."""
        lines = {}
        for pid, paths in logs.items():
            size = sum(os.path.getsize(path) for path in paths if os.path.exists(path))
            if size != self._sizes.get(pid):
                self._sizes[pid] = size
                lines[pid] = last_lines(paths)
        return {pid: process_state(pid) for pid in logs}, lines

    def end(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def lines(self, paths: Sequence[str]) -> list[str]:
        return last_lines(paths)


class _RemoteNode:
    """The probe of a remote node and its last result."""

    def __init__(self, node_id: str) -> None:
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": strategy}
        self.actor = ray.remote(_NodeProbe).options(**options).remote()
        self.answers = 0
        self.states: dict[int, str] = {}
        self.lines: dict[int, list[str]] = {}
        """The last log lines by pid; they outlive the node."""
        self._question: tuple[ray.ObjectRef, float] | None = None

    def ask(self, logs: Mapping[int, Sequence[str]]) -> float | None:
        """Reads an answer, if there is one, and asks again; returns when the answered question was asked."""
        asked_at = None
        if self._question is not None and ray.wait([self._question[0]], timeout=0)[0]:
            ref, time_of_question = self._question
            with suppress(RayError):  # the probe is restarting, or its node is gone
                self.states, lines = ray.get(ref)
                self.lines |= lines
                self.answers += 1
                asked_at = time_of_question
            self._question = None
        if self._question is None:
            self._question = self.actor.read.remote(dict(logs)), time.monotonic()
        return asked_at


class _Ping:
    """Calls the control plane periodically, in a thread, because the call may hang."""

    def __init__(self) -> None:
        self.number = 0
        self.unanswered = False
        self.dead: dict[str, str] = {}
        """Ray's reason for each node that it calls dead."""
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="ray-ping", daemon=True).start()

    def _run(self) -> None:
        while not self._closed.wait(PING_EVERY_S) and ray.is_initialized():
            self.number += 1
            self.unanswered = True
            with suppress(RayError):
                self.dead = _dead_among(ray.nodes())
                self.unanswered = False

    def close(self) -> None:
        self._closed.set()


def answer_of(question: Callable[[], T]) -> T:
    """Returns the result of a call to the control plane; raises ClusterFailed if it hangs.

    Such a call has no deadline of its own.
    """
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="ray-question", daemon=True).start()
    limit_s = TrainerConfig.liveness_deadline_s if _watch is None else _watch.silence.limit_s
    try:
        return answer.result(limit_s)
    except TimeoutError:
        if _watch is not None:
            _watch.failed = True
        event, hint = _silent_control_plane(limit_s)
        raise ClusterFailed(event, "the trainer", "the list of nodes", hint) from None


def _silent_control_plane(limit_s: float) -> tuple[str, str]:
    """Returns what has happened and what to do."""
    address = ray.get_runtime_context().gcs_address
    return (
        f"Ray's control plane (the GCS at {address}) has not answered for {limit_s:g} s",
        "look at gcs_server.out among Ray's logs on the head node",
    )


def _dead_among(nodes: Sequence[Row]) -> dict[str, str]:
    """Returns Ray's reason for each node that it calls dead."""
    return {
        node["NodeID"]: f"Ray reports: {node.get('DeathReasonMessage') or 'node failure'}"
        for node in nodes
        if not node["Alive"]
    }


def raylet_problem(node_id: str) -> str | None:
    """Returns why the raylet of a node does not answer, or None if it accepts connections."""
    nodes = answer_of(ray.nodes)
    entry = next((node for node in nodes if node["NodeID"] == node_id), None)
    if entry is None or not entry["Alive"]:
        return _dead_among(nodes).get(node_id, "Ray does not know it")
    address = entry["NodeManagerAddress"], entry["NodeManagerPort"]
    try:
        socket.create_connection(address, CONNECT_DEADLINE_S).close()
    except OSError as error:
        return f"its raylet at {address[0]}:{address[1]} does not answer ({error})"
    return None


class ClusterWatch:
    """Watches the processes of this cluster that the trainer depends on."""

    def __init__(self, limit_s: float, own: Mapping[str, int], log_folder: str = "") -> None:
        self.failed = False
        self._own = dict(own)
        self._log_folder = log_folder
        self.silence = Silence(limit_s)
        """Its limit is the `trainer.liveness_deadline_s` of the run."""
        self.ping = _Ping()
        self.here = ray.get_runtime_context().get_node_id()
        self._seats: dict[tuple[str, int], tuple[str, Seat]] = {}
        self._nodes: dict[str, _RemoteNode] = {}
        self._lock = threading.Lock()
        self._refresh_at = 0.0

    def add(self, role: str, seats: Sequence[Seat], limit_s: float) -> None:
        """Starts watching these processes."""
        self.silence.limit_s = limit_s
        for seat in seats:
            self._seats[seat.node_id, seat.pid] = role, seat
            if seat.node_id != self.here and seat.node_id not in self._nodes:
                self._nodes[seat.node_id] = _RemoteNode(seat.node_id)

    def remove(self, seats: Sequence[Seat]) -> None:
        """Stops watching these processes and removes probes that are no longer needed."""
        for seat in seats:
            self._seats.pop((seat.node_id, seat.pid), None)
        for node_id in self._nodes.keys() - {node_id for node_id, _ in self._seats}:
            ray.kill(self._nodes.pop(node_id).actor)

    def look(self, owner: str, method: str) -> None:
        """Raises if the result that `owner` waits for can no longer arrive."""
        with self._lock:
            silent: dict[Hashable, Callable[[], RuntimeError]] = {}
            limit = f"{self.silence.limit_s:g} s"
            failed = partial(self._failed, owner, method)
            for name, pid in self._own.items():  # Ray's processes, if we started them
                who = f"{PARTS[name]} ({name}, pid {pid} on this machine)"
                hint = (
                    "killed for memory, crashed, or stopped from outside: see "
                    f"{self._log_folder}/{name}.out"
                )
                state = process_state(pid)
                if state in (GONE, ZOMBIE):
                    raise failed(f"{who} has ended", hint)
                if state == STOPPED:
                    event = f"{who} has been stopped (SIGSTOP) for {limit}"
                    silent[name] = partial(failed, event, hint)
            for node_id, node in self._nodes.items():
                node.ask(self._logs(node_id))
                if node_id in self.ping.dead:
                    raise self.lost(node_id, owner, method, self.ping.dead[node_id])
                if node.answers:
                    event = f"it has not answered for {limit}"
                    lost = partial(self.lost, node_id, owner, method, event)
                    silent[node_id, "node", node.answers] = lost
            for (node_id, pid), (role, seat) in self._seats.items():
                remote = self._nodes.get(node_id)
                state = process_state(pid) if remote is None else remote.states.get(pid, "")
                if state == STOPPED:
                    silent[node_id, pid] = partial(self._end, role, seat, owner, method)
            if self.ping.unanswered:
                silence = _silent_control_plane(self.silence.limit_s)
                silent["ping", self.ping.number] = partial(failed, *silence)
            for target in self.silence.look(silent, time.monotonic()):
                raise silent[target]()

    def lines(self, seat: Seat) -> list[str]:
        """Returns the last log lines of a process on a remote node."""
        node = self._nodes.get(seat.node_id)
        if node is None:
            return []
        try:
            return list(ray.get(node.actor.lines.remote(seat.logs), timeout=LOG_DEADLINE_S))
        except RayError:
            return node.lines.get(seat.pid, ["(its log could not be read from here)"])

    def refresh(self) -> None:
        """Reads new answers of the probes, at most every PING_EVERY_S, so that log lines are recent."""
        if self._nodes and time.monotonic() > self._refresh_at:
            self._refresh_at = time.monotonic() + PING_EVERY_S
            with self._lock:
                for node_id, node in self._nodes.items():
                    node.ask(self._logs(node_id))

    def raise_if_node_is_lost(self, node_id: str, owner: str, method: str) -> None:
        """Raises NodeLost unless the node, which has lost a worker, answers a question asked later.

        A node answers for some seconds after its raylet has died, and Ray calls it alive for longer; its
        raylet is asked too.
        """
        if node_id == self.here and (reason := raylet_problem(node_id)) is not None:
            event = f"the Ray node of this machine was lost ({reason})"
            raise ClusterFailed(event, owner, method, "start it again with `ray start`")
        if (node := self._nodes.get(node_id)) is None:
            return
        began = time.monotonic()
        while time.monotonic() < began + NODE_DEADLINE_S:
            if (reason := raylet_problem(node_id)) is not None:
                raise self.lost(node_id, owner, method, reason)
            with self._lock:
                asked_at = node.ask(self._logs(node_id))
            if asked_at is not None and asked_at > began + LAST_ANSWER_S:
                return
            time.sleep(0.5)
        reason = f"it has not answered for {NODE_DEADLINE_S:g} s"
        raise self.lost(node_id, owner, method, reason)

    def raise_if_any_is_lost(self, owner: str, method: str) -> None:
        """Raises if a worker of any group is gone, which may be why another one failed."""
        for (node_id, pid), (role, seat) in list(self._seats.items()):
            if node_id == self.here and process_state(pid) in (GONE, ZOMBIE):
                raise WorkerDied(role, seat, method, "its process is gone", last_lines(seat.logs))
        end_time, answered = time.monotonic() + ANSWER_DEADLINE_S, set[str]()
        while (waiting := self._nodes.keys() - answered) and time.monotonic() < end_time:
            for node_id in waiting:
                with self._lock:
                    asked_at = self._nodes[node_id].ask(self._logs(node_id))
                if asked_at is not None and asked_at > end_time - ANSWER_DEADLINE_S:
                    answered.add(node_id)
            time.sleep(0.1)
        for node_id, node in list(self._nodes.items()):
            gone = {pid for pid in self._logs(node_id) if node.states.get(pid) in (GONE, ZOMBIE)}
            if gone or node_id not in answered:
                self.raise_if_node_is_lost(node_id, owner, method)
            for pid in gone:
                role, seat = self._seats[node_id, pid]
                raise WorkerDied(role, seat, method, "its process is gone", self.lines(seat))

    def lost(self, node_id: str, owner: str, method: str, reason: str) -> NodeLost:
        """Returns the error about a lost node, which is not used again."""
        _lost.add(node_id)
        known = self._nodes[node_id].lines
        seats = [(role, seat) for role, seat in self._seats.values() if seat.node_id == node_id]
        workers = [(role, seat, tuple(known.get(seat.pid, ()))) for role, seat in seats]
        return NodeLost(node_id, seats[0][1].node_ip, workers, owner, method, reason)

    def _logs(self, node_id: str) -> dict[int, tuple[str, ...]]:
        return {pid: seat.logs for (at, pid), (_, seat) in self._seats.items() if at == node_id}

    def _failed(self, owner: str, method: str, event: str, hint: str) -> ClusterFailed:
        self.failed = True
        return ClusterFailed(event, owner, method, hint)

    def _end(self, role: str, seat: Seat, owner: str, method: str) -> WorkerStopped:
        if seat.node_id == self.here:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(seat.pid, signal.SIGKILL)
        else:
            self._nodes[seat.node_id].actor.end.remote(seat.pid)
        return WorkerStopped(role, seat, owner, method, self.silence.limit_s)


_watch: ClusterWatch | None = None
_lost: set[str] = set()


def lost_nodes() -> frozenset[str]:
    """Returns the ids of nodes that this process has seen fail; a node that comes back has a new id."""
    return frozenset(_lost)


def watch_cluster(own: Mapping[str, int], log_folder: str = "") -> None:
    """Starts watching the joined cluster; `own` maps names of Ray processes to pids."""
    global _watch
    _watch = ClusterWatch(TrainerConfig.liveness_deadline_s, own, log_folder)


def watch_workers(role: str, seats: Sequence[Seat], limit_s: float) -> None:
    """Adds the processes of a worker group to the watch."""
    if _watch is not None and _watch.here != ray.get_runtime_context().get_node_id():
        end_watch()  # this process has since joined or started another cluster
    if _watch is None:
        watch_cluster({})
    assert _watch is not None
    _watch.add(role, seats, limit_s)


def forget_workers(seats: Sequence[Seat]) -> None:
    """Removes the processes of a worker group from the watch, before they end."""
    if _watch is not None and not _watch.failed:
        _watch.remove(seats)


def end_watch() -> None:
    """Stops watching: this process leaves the cluster."""
    global _watch
    if _watch is not None:
        _watch.ping.close()
    _watch = None


def look(owner: str, method: str) -> None:
    """Raises if the result that `owner` waits for can no longer arrive; only the trainer process checks."""
    if _watch is not None:
        _watch.look(owner, method)


def refresh() -> None:
    """Keeps the log lines of remote workers recent; called after waits."""
    if _watch is not None:
        _watch.refresh()


def raise_if_lost(owner: str, method: str, node_id: str | None = None) -> None:
    """Raises if this node, or by default any watched process, is lost; only the trainer process checks."""
    if _watch is None or _watch.failed:
        return
    if node_id is None:
        _watch.raise_if_any_is_lost(owner, method)
    else:
        _watch.raise_if_node_is_lost(node_id, owner, method)


def lines_of_another_node(seat: Seat) -> list[str]:
    """Returns the last log lines of a process on a remote node; only the trainer process can."""
    return _watch.lines(seat) if _watch is not None else ["(its log is on its node)"]


def cluster_failed() -> bool:
    """Whether Ray itself has failed; it must not be called then."""
    return _watch is not None and _watch.failed
