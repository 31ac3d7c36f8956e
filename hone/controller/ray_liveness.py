"""Whether the workers' processes, their nodes and Ray itself still live, asked while the loop waits.

Processes of this machine are read from /proc, those of another node by a probe there, and Ray's control
plane by a call. A worker that is busy is not silent. Leaves out work that never ends: a deadline of
its phase does.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hone.config.trainer import TrainerConfig
from hone.controller.failures import ClusterFailed, Seat, WorkerStopped
from hone.controller.processes import (
    GONE,
    STOPPED,
    ZOMBIE,
    Silence,
    Target,
    last_lines,
    process_state,
)

PING_EVERY_S = 2.0
LOG_DEADLINE_S = 10.0
PARTS = {"gcs_server": "Ray's control plane", "raylet": "Ray's node manager"}


class _NodeProbe:
    """Looks at processes of its node; an actor of its own, so that a busy worker is not asked."""

    def states(self, pids: list[int]) -> list[str]:
        return [process_state(pid) for pid in pids]

    def end(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def lines(self, paths: Sequence[str]) -> list[str]:
        return last_lines(paths)


class _RemoteNode:
    """The probe of another node, and what it said last."""

    def __init__(self, node_id: str) -> None:
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": strategy}
        self.actor = ray.remote(_NodeProbe).options(**options).remote()
        self.answers = 0
        self._asked: tuple[ray.ObjectRef, list[int]] | None = None
        self._states: dict[int, str] = {}

    def states(self, pids: list[int]) -> dict[int, str]:
        """The states last heard of; the next question is on its way."""
        if self._asked is not None and ray.wait([self._asked[0]], timeout=0)[0]:
            ref, asked = self._asked
            with suppress(RayError):  # no answer; the probe is started again, or its node is gone
                self._states = dict(zip(asked, ray.get(ref), strict=True))
                self.answers += 1
            self._asked = None
        if self._asked is None:
            self._asked = self.actor.states.remote(pids), pids
        return self._states


class _Ping:
    """Asks the control plane again and again, in a thread that may hang with it."""

    def __init__(self) -> None:
        self.number = 0
        self.unanswered = False
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="ray-ping", daemon=True).start()

    def _run(self) -> None:
        while not self._closed.wait(PING_EVERY_S) and ray.is_initialized():
            self.number += 1
            self.unanswered = True
            with suppress(RayError):
                ray.nodes()
                self.unanswered = False

    def close(self) -> None:
        self._closed.set()


class ClusterWatch:
    """What lives in this cluster, as far as the loop depends on it."""

    def __init__(self, limit_s: float, own: Mapping[str, int], log_folder: str = "") -> None:
        self.failed = False
        self._own = dict(own)
        self._log_folder = log_folder
        self._silence = Silence(limit_s)
        self._ping = _Ping()
        self.here = ray.get_runtime_context().get_node_id()
        self._seats: dict[tuple[str, int], tuple[str, Seat]] = {}
        self._nodes: dict[str, _RemoteNode] = {}
        self._lock = threading.Lock()

    def add(self, role: str, seats: Sequence[Seat], limit_s: float) -> None:
        """Look at these processes from now on."""
        self._silence.limit_s = limit_s
        for seat in seats:
            self._seats[seat.node_id, seat.pid] = role, seat
            if seat.node_id != self.here and seat.node_id not in self._nodes:
                self._nodes[seat.node_id] = _RemoteNode(seat.node_id)

    def remove(self, seats: Sequence[Seat]) -> None:
        """Forget these processes, and the probes of nodes where there are no more."""
        for seat in seats:
            self._seats.pop((seat.node_id, seat.pid), None)
        for node_id in self._nodes.keys() - {node_id for node_id, _ in self._seats}:
            ray.kill(self._nodes.pop(node_id).actor)

    def close(self) -> None:
        self._ping.close()

    def look(self, owner: str, method: str) -> None:
        """Raise where what `owner` waits for can never come; called while it waits."""
        with self._lock:
            silent = self._stopped_or_gone(owner, method)
            silent += self._stopped_workers()
            silent += [
                Target("node", node_id, node.answers)
                for node_id, node in self._nodes.items()
                if node.answers
            ]
            if self._ping.unanswered:
                silent.append(Target("ping", number=self._ping.number))
            for target in self._silence.look(silent, time.monotonic()):
                self._raise(target, owner, method)

    def lines(self, seat: Seat) -> list[str]:
        """What a process of another node wrote last."""
        node = self._nodes.get(seat.node_id)
        try:
            told = (
                ray.get(node.actor.lines.remote(seat.logs), timeout=LOG_DEADLINE_S) if node else []
            )
            return list(told)
        except RayError as error:
            return [f"(its log could not be read from here: {type(error).__name__})"]

    def _stopped_or_gone(self, owner: str, method: str) -> list[Target]:
        """Ray's own processes, where we started them: a dead one is told at once."""
        stopped: list[Target] = []
        for name, pid in self._own.items():
            state = process_state(pid)
            if state in (GONE, ZOMBIE):
                raise self._lost(name, "has ended", owner, method)
            if state == STOPPED:
                stopped.append(Target("own", name))
        return stopped

    def _stopped_workers(self) -> list[Target]:
        stopped: list[Target] = []
        far: dict[str, list[int]] = {node_id: [] for node_id in self._nodes}
        for node_id, pid in self._seats:
            if node_id in far:
                far[node_id].append(pid)
            elif process_state(pid) == STOPPED:
                stopped.append(Target("seat", node_id, pid))
        for node_id, pids in far.items():
            states = self._nodes[node_id].states(pids)
            stopped += [Target("seat", node_id, pid) for pid in pids if states.get(pid) == STOPPED]
        return stopped

    def _raise(self, target: Target, owner: str, method: str) -> None:
        limit = f"{self._silence.limit_s:g} s"
        if target.kind == "seat":
            role, seat = self._seats[target.name, target.number]
            self._end(seat)
            raise WorkerStopped(role, seat, owner, method, self._silence.limit_s)
        if target.kind == "own":
            raise self._lost(target.name, f"has been stopped (SIGSTOP) for {limit}", owner, method)
        self.failed = True
        if target.kind == "node":
            ips = sorted(
                {
                    seat.node_ip
                    for (node, _), (_, seat) in self._seats.items()
                    if node == target.name
                }
            )
            raise ClusterFailed(
                f"node {', '.join(ips)} of the Ray cluster has not answered for {limit}",
                owner,
                method,
                "look whether the machine runs and can be reached, and at `ray status`",
            )
        raise ClusterFailed(
            f"Ray's control plane (the GCS at {ray.get_runtime_context().gcs_address}) has not "
            f"answered for {limit}",
            owner,
            method,
            "look at gcs_server.out among Ray's logs on the head node",
        )

    def _lost(self, name: str, event: str, owner: str, method: str) -> ClusterFailed:
        self.failed = True
        return ClusterFailed(
            f"{PARTS[name]} ({name}, pid {self._own[name]} on this machine) {event}",
            owner,
            method,
            f"killed for memory, crashed, or stopped from outside: see {self._log_folder}/{name}.out",
        )

    def _end(self, seat: Seat) -> None:
        if seat.node_id == self.here:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(seat.pid, signal.SIGKILL)
        else:
            self._nodes[seat.node_id].actor.end.remote(seat.pid)


_watch: ClusterWatch | None = None


def watch_cluster(own: Mapping[str, int], log_folder: str = "") -> None:
    """Begin to look at the cluster that this process has joined; `own` are Ray's processes by name."""
    global _watch
    _watch = ClusterWatch(TrainerConfig.liveness_deadline_s, own, log_folder)


def watch_workers(role: str, seats: Sequence[Seat], limit_s: float) -> None:
    """Look at the processes of a group, too."""
    if _watch is not None and _watch.here != ray.get_runtime_context().get_node_id():
        end_watch()  # the program has left that cluster and joined or started another
    if _watch is None:
        watch_cluster({})
    assert _watch is not None
    _watch.add(role, seats, limit_s)


def forget_workers(seats: Sequence[Seat]) -> None:
    """The processes of a group are about to end."""
    if _watch is not None and not _watch.failed:
        _watch.remove(seats)


def end_watch() -> None:
    """Look no more: this process leaves the cluster."""
    global _watch
    if _watch is not None:
        _watch.close()
    _watch = None


def look(owner: str, method: str) -> None:
    """Raise where what `owner` waits for can never come. Only the loop's process looks."""
    if _watch is not None:
        _watch.look(owner, method)


def lines_of_another_node(seat: Seat) -> list[str]:
    """What a process of another node wrote last, where this is the loop's process."""
    return _watch.lines(seat) if _watch is not None else ["(its log is on its node)"]


def cluster_failed() -> bool:
    """Whether Ray itself was found dead: it must not be asked for anything."""
    return _watch is not None and _watch.failed
