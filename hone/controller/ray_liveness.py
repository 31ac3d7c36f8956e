"""Checks that worker processes, their nodes and Ray itself are alive while the trainer waits.

Local processes are checked in /proc, remote ones by a probe actor on their node, and Ray's control plane
by a call. A busy worker counts as alive; the phase deadline limits work that never ends.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hone.config.trainer import TrainerConfig
from hone.controller.failures import ClusterFailed, Seat, WorkerStopped
from hone.controller.processes import GONE, STOPPED, ZOMBIE, Silence, last_lines, process_state

PING_EVERY_S = 2.0
LOG_DEADLINE_S = 10.0
PARTS = {"gcs_server": "Ray's control plane", "raylet": "Ray's node manager"}


class _NodeProbe:
    """Reads process states on its node; a separate actor, because busy workers cannot answer."""

    def states(self, pids: list[int]) -> list[str]:
        return [process_state(pid) for pid in pids]

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
        self._question: tuple[ray.ObjectRef, list[int]] | None = None
        self._states: dict[int, str] = {}

    def states(self, pids: list[int]) -> dict[int, str]:
        """Returns the last known states and requests new ones."""
        if self._question is not None and ray.wait([self._question[0]], timeout=0)[0]:
            ref, requested_pids = self._question
            with suppress(RayError):  # the probe is restarting, or its node is gone
                self._states = dict(zip(requested_pids, ray.get(ref), strict=True))
                self.answers += 1
            self._question = None
        if self._question is None:
            self._question = self.actor.states.remote(pids), pids
        return self._states


class _Ping:
    """Calls the control plane periodically, in a thread, because the call may hang."""

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
    """Watches the processes of this cluster that the trainer depends on."""

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
        """Starts watching these processes."""
        self._silence.limit_s = limit_s
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

    def close(self) -> None:
        self._ping.close()

    def look(self, owner: str, method: str) -> None:
        """Raises if the result that `owner` waits for can no longer arrive."""
        with self._lock:
            silent: dict[Hashable, Callable[[], RuntimeError]] = {}
            limit = f"{self._silence.limit_s:g} s"
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
                    silent[name] = partial(
                        failed, f"{who} has been stopped (SIGSTOP) for {limit}", hint
                    )
            for worker, (role, seat) in self._stopped_workers().items():
                silent[worker] = partial(self._end, role, seat, owner, method)
            for node_id, node in self._nodes.items():
                ips = {seat.node_ip for _, seat in self._seats.values() if seat.node_id == node_id}
                if node.answers:
                    silent[node_id, "node", node.answers] = partial(
                        failed,
                        f"node {', '.join(sorted(ips))} of the Ray cluster has not answered for {limit}",
                        "look whether the machine runs and can be reached, and at `ray status`",
                    )
            if self._ping.unanswered:
                address = ray.get_runtime_context().gcs_address
                silent["ping", self._ping.number] = partial(
                    failed,
                    f"Ray's control plane (the GCS at {address}) has not answered for {limit}",
                    "look at gcs_server.out among Ray's logs on the head node",
                )
            for target in self._silence.look(silent, time.monotonic()):
                raise silent[target]()

    def lines(self, seat: Seat) -> list[str]:
        """Returns the last log lines of a process on a remote node."""
        node = self._nodes.get(seat.node_id)
        if node is None:
            return []
        try:
            return list(ray.get(node.actor.lines.remote(seat.logs), timeout=LOG_DEADLINE_S))
        except RayError as error:
            return [f"(its log could not be read from here: {type(error).__name__})"]

    def _stopped_workers(self) -> dict[tuple[str, int], tuple[str, Seat]]:
        states: dict[str, dict[int, str]] = {}
        for node_id, node in self._nodes.items():
            states[node_id] = node.states([pid for at, pid in self._seats if at == node_id])
        return {
            (node_id, pid): seat
            for (node_id, pid), seat in self._seats.items()
            if (states[node_id].get(pid) if node_id in states else process_state(pid)) == STOPPED
        }

    def _failed(self, owner: str, method: str, event: str, hint: str) -> ClusterFailed:
        self.failed = True
        return ClusterFailed(event, owner, method, hint)

    def _end(self, role: str, seat: Seat, owner: str, method: str) -> WorkerStopped:
        if seat.node_id == self.here:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(seat.pid, signal.SIGKILL)
        else:
            self._nodes[seat.node_id].actor.end.remote(seat.pid)
        return WorkerStopped(role, seat, owner, method, self._silence.limit_s)


_watch: ClusterWatch | None = None


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
        _watch.close()
    _watch = None


def look(owner: str, method: str) -> None:
    """Raises if the result that `owner` waits for can no longer arrive; only the trainer process checks."""
    if _watch is not None:
        _watch.look(owner, method)


def lines_of_another_node(seat: Seat) -> list[str]:
    """Returns the last log lines of a process on a remote node; only the trainer process can."""
    return _watch.lines(seat) if _watch is not None else ["(its log is on its node)"]


def cluster_failed() -> bool:
    """Whether Ray itself has failed; it must not be called then."""
    return _watch is not None and _watch.failed
