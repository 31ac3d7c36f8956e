"""Checks that workers, their nodes and Ray itself are alive while the trainer waits.

Processes on this machine are checked in /proc, processes on other nodes by a probe on their node, and Ray's
control plane by a call. A busy worker counts as alive; the phase deadline ends work that takes too long.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from typing import TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hone.config.trainer import TrainerConfig
from hone.controller.failures import (
    ClusterFailed,
    NodeLost,
    WorkerDied,
    WorkerProcess,
    WorkerStopped,
)
from hone.controller.processes import (
    GONE,
    STOPPED,
    ZOMBIE,
    NodeProbe,
    UnresponsiveTimer,
    last_lines,
    process_state,
)
from hone.event_loop import DAEMON_THREADS
from hone.types import Fields

T = TypeVar("T")

PING_INTERVAL_S = 2.0
LOG_DEADLINE_S = 15.0
CONNECT_DEADLINE_S = 5.0
PROBE_OUTLIVES_RAYLET_S = 5.0
"""A probe can answer requests for this long after the raylet of its node has died."""
ANSWER_DEADLINE_S = 5.0
NODE_DEADLINE_S = 22.0
"""Longer than the 15 s within which Ray's health checks report a lost node."""
RAY_PROCESSES = {"gcs_server": "Ray's control plane", "raylet": "Ray's node manager"}
ENDED_REASON = "its process has ended"


class RemoteNode:
    """A remote node, in the state that its probe last reported."""

    def __init__(self, node_id: str) -> None:
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": strategy}
        self.actor = ray.remote(NodeProbe).options(**options).remote()
        self.answer_count = 0
        """The number of answers of the probe so far."""
        self.states: dict[int, str] = {}
        """The state of each process by pid."""
        self.log_lines: dict[int, list[str]] = {}
        """The last log lines by pid; they can be read after the node is lost."""
        self._request: tuple[ray.ObjectRef, float] | None = None

    def poll(self, logs: Mapping[int, Sequence[str]]) -> float | None:
        """Reads the answer, if any, and sends the next request; returns when the answered one was sent."""
        sent_at = None  # without an answer
        if self._request is not None and ray.wait([self._request[0]], timeout=0)[0]:
            ref, request_time = self._request
            with suppress(RayError):  # the probe restarts, or its node is lost
                self.states, log_lines = ray.get(ref)
                self.log_lines |= log_lines
                self.answer_count += 1
                sent_at = request_time
            self._request = None
        if self._request is None:
            self._request = self.actor.read.remote(dict(logs)), time.monotonic()
        return sent_at


class _Ping:
    """Calls the control plane periodically in a thread, because the call may hang."""

    def __init__(self) -> None:
        self.ping_count = 0
        """The number of pings so far, which identifies the current ping in the timer."""
        self.is_unanswered = False
        """Whether the current ping has no answer yet."""
        self.dead_nodes: dict[str, str] = {}
        """Ray's reason for each dead node, by node id."""
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="ray-ping", daemon=True).start()

    def _run(self) -> None:
        while not self._closed.wait(PING_INTERVAL_S) and ray.is_initialized():
            self.ping_count += 1
            self.is_unanswered = True
            with suppress(RayError):
                self.dead_nodes = _dead_nodes(ray.nodes())
                self.is_unanswered = False

    def close(self) -> None:
        self._closed.set()


def call_control_plane(request: Callable[[], T]) -> T:
    """Returns the result of `request`; raises ClusterFailed if the request hangs."""
    limit_s = _watch.unresponsive_timer.limit_s if _watch else TrainerConfig.liveness_deadline_s
    try:
        return DAEMON_THREADS.submit(request).result(limit_s)
    except FutureTimeoutError:  # before Python 3.11 no TimeoutError
        if _watch is not None:
            _watch.failed = True
        event, hint = _control_plane_timeout_message(limit_s)
        raise ClusterFailed(event, "the trainer", "the list of nodes", hint) from None


def _control_plane_timeout_message(limit_s: float) -> tuple[str, str]:
    """Returns the event and the hint of the ClusterFailed error about an unanswered call."""
    address = ray.get_runtime_context().gcs_address
    return (
        f"Ray's control plane (the GCS at {address}) has not answered for {limit_s:g} s",
        "see gcs_server.out among Ray's logs on the head node",
    )


def _dead_nodes(nodes: Sequence[Fields]) -> dict[str, str]:
    """Returns Ray's reason for each dead node, by node id."""
    return {
        node["NodeID"]: f"Ray reports: {node.get('DeathReasonMessage') or 'node failure'}"
        for node in nodes
        if not node["Alive"]
    }


def raylet_problem(node_id: str) -> str | None:
    """Returns why the raylet of a node is unreachable, or None if it accepts connections."""
    nodes = call_control_plane(ray.nodes)
    entry = next((node for node in nodes if node["NodeID"] == node_id), None)
    if entry is None or not entry["Alive"]:
        return _dead_nodes(nodes).get(node_id, "Ray does not list it")
    address = entry["NodeManagerAddress"], entry["NodeManagerPort"]
    try:
        socket.create_connection(address, CONNECT_DEADLINE_S).close()
    except OSError as error:
        return f"its raylet at {address[0]}:{address[1]} does not answer ({error})"
    return None


class ClusterWatch:
    """Watches the processes of this cluster that the trainer depends on."""

    def __init__(self, limit_s: float, ray_pids: Mapping[str, int], log_folder: str = "") -> None:
        self.failed = False
        """Whether Ray itself has failed, so that calls to Ray would hang."""
        self._ray_pids = dict(ray_pids)
        """The pids of the Ray processes that this process started, by name."""
        self._log_folder = log_folder
        self.unresponsive_timer = UnresponsiveTimer(limit_s)
        """Its limit is the `trainer.liveness_deadline_s` of the run."""
        self.ping = _Ping()
        self.local_node_id = ray.get_runtime_context().get_node_id()
        self._workers: dict[tuple[str, int], tuple[str, WorkerProcess]] = {}
        self._nodes: dict[str, RemoteNode] = {}
        self._lock = threading.Lock()
        self._refresh_at = 0.0

    def add(self, role: str, workers: Sequence[WorkerProcess], limit_s: float) -> None:
        """Starts watching these processes; `limit_s` is the liveness deadline of the run."""
        self.unresponsive_timer.limit_s = limit_s
        # Both dicts are replaced, not changed, because other threads iterate over them.
        for worker in workers:
            self._workers = {**self._workers, (worker.node_id, worker.pid): (role, worker)}
            if worker.node_id != self.local_node_id and worker.node_id not in self._nodes:
                self._nodes = {**self._nodes, worker.node_id: RemoteNode(worker.node_id)}

    def remove(self, workers: Sequence[WorkerProcess]) -> None:
        """Stops watching these processes and removes probes that are no longer needed."""
        removed = {(worker.node_id, worker.pid) for worker in workers}
        self._workers = {key: entry for key, entry in self._workers.items() if key not in removed}
        nodes, watched_ids = self._nodes, {node_id for node_id, _ in self._workers}
        self._nodes = {node_id: node for node_id, node in nodes.items() if node_id in watched_ids}
        for node_id in nodes.keys() - watched_ids:
            ray.kill(nodes[node_id].actor)

    def check_alive(self, waiting_role: str, awaited: str) -> None:
        """Raises if a process, a node or Ray has failed while `waiting_role` waits for `awaited`."""
        with self._lock:
            # The timer measures how long a key is in this dict. If a target answers, its entry is missing in
            # the next call, or has a new key; its time then starts again.
            errors_by_target: dict[Hashable, Callable[[], RuntimeError]] = {}

            def cluster_error(event: str, hint: str) -> ClusterFailed:
                self.failed = True
                return ClusterFailed(event, waiting_role, awaited, hint)

            limit = f"{self.unresponsive_timer.limit_s:g} s"
            for name, pid in self._ray_pids.items():
                process = f"{RAY_PROCESSES[name]} ({name}, pid {pid} on this machine)"
                log_file = f"{self._log_folder}/{name}.out"
                hint = f"out of memory, a crash, or a signal from outside: see {log_file}"
                state = process_state(pid)
                if state in (GONE, ZOMBIE):
                    raise cluster_error(f"{process} has ended", hint)
                if state == STOPPED:
                    event = f"{process} has been stopped (SIGSTOP) for {limit}"
                    errors_by_target[name] = partial(cluster_error, event, hint)
            for node_id, node in self._nodes.items():
                self._poll(node_id)
                if reason := self.ping.dead_nodes.get(node_id):
                    raise self.lost_node_error(node_id, waiting_role, awaited, reason)
                # Until the first answer, the deadline of the start applies.
                if node.answer_count > 0:
                    reason = f"it has not answered for {limit}"
                    error = partial(self.lost_node_error, node_id, waiting_role, awaited, reason)
                    errors_by_target[node_id, "node", node.answer_count] = error
            for (node_id, pid), (role, worker) in self._workers.items():
                remote = self._nodes.get(node_id)
                state = process_state(pid) if remote is None else remote.states.get(pid, "")
                if state == STOPPED:
                    errors_by_target[node_id, pid] = partial(
                        self._kill_stopped_worker, role, worker, waiting_role, awaited
                    )
            if self.ping.is_unanswered:
                event, hint = _control_plane_timeout_message(self.unresponsive_timer.limit_s)
                errors_by_target["ping", self.ping.ping_count] = partial(cluster_error, event, hint)
            unresponsive = self.unresponsive_timer.update(errors_by_target, time.monotonic())
            if unresponsive:
                raise errors_by_target[unresponsive[0]]()

    def log_lines(self, worker: WorkerProcess) -> list[str]:
        """Returns the last log lines of a process on a remote node."""
        node = self._nodes.get(worker.node_id)
        if node is None:
            return []
        try:
            return list(ray.get(node.actor.log_lines.remote(worker.logs), timeout=LOG_DEADLINE_S))
        except RayError:
            return node.log_lines.get(worker.pid, ["(its log could not be read from here)"])

    def refresh_logs(self) -> None:
        """Reads recent log lines from the probes, at most every PING_INTERVAL_S."""
        if self._nodes and time.monotonic() > self._refresh_at:
            self._refresh_at = time.monotonic() + PING_INTERVAL_S
            with self._lock:
                for node_id in self._nodes:
                    self._poll(node_id)

    def raise_if_node_lost(self, node_id: str, waiting_role: str, awaited: str) -> None:
        """Waits up to NODE_DEADLINE_S for an answer of the node's probe; raises NodeLost without one.

        The answer must be to a request that was sent at least PROBE_OUTLIVES_RAYLET_S after this call,
        because a probe answers for seconds after its raylet has died, and Ray lists the node even longer.
        """
        if node_id == self.local_node_id and (reason := raylet_problem(node_id)) is not None:
            event = f"the Ray node of this machine was lost ({reason})"
            raise ClusterFailed(event, waiting_role, awaited, "start it again with `ray start`")
        if node_id not in self._nodes:
            return
        start = time.monotonic()
        while time.monotonic() < start + NODE_DEADLINE_S:
            if (reason := raylet_problem(node_id)) is not None:
                raise self.lost_node_error(node_id, waiting_role, awaited, reason)
            with self._lock:
                sent_at = self._poll(node_id)
            if sent_at is not None and sent_at > start + PROBE_OUTLIVES_RAYLET_S:
                return
            time.sleep(0.5)
        reason = f"it has not answered for {NODE_DEADLINE_S:g} s"
        raise self.lost_node_error(node_id, waiting_role, awaited, reason)

    def raise_if_any_lost(self, waiting_role: str, awaited: str) -> None:
        """Raises WorkerDied or NodeLost if any watched worker has ended or any node does not answer."""
        for (node_id, pid), (role, worker) in list(self._workers.items()):
            if node_id == self.local_node_id and process_state(pid) in (GONE, ZOMBIE):
                raise WorkerDied(role, worker, awaited, ENDED_REASON, last_lines(worker.logs))
        end_time, answered_ids = time.monotonic() + ANSWER_DEADLINE_S, set[str]()
        while (pending_ids := self._nodes.keys() - answered_ids) and time.monotonic() < end_time:
            for node_id in pending_ids:
                with self._lock:
                    sent_at = self._poll(node_id)
                if sent_at is not None and sent_at > end_time - ANSWER_DEADLINE_S:
                    answered_ids.add(node_id)
            time.sleep(0.1)
        for node_id, node in list(self._nodes.items()):
            ended_pids = [pid for pid, state in node.states.items() if state in (GONE, ZOMBIE)]
            workers = self._workers_on(node_id)
            ended_workers = [entry for entry in workers if entry[1].pid in ended_pids]
            if ended_workers or node_id not in answered_ids:
                self.raise_if_node_lost(node_id, waiting_role, awaited)
            for role, worker in ended_workers:
                raise WorkerDied(role, worker, awaited, ENDED_REASON, self.log_lines(worker))

    def lost_node_error(
        self, node_id: str, waiting_role: str, awaited: str, reason: str
    ) -> NodeLost:
        """Returns the error about a lost node, and excludes the node from later placements."""
        lost_node_ids.add(node_id)
        lines_by_pid = self._nodes[node_id].log_lines
        workers = [
            (role, worker, tuple(lines_by_pid.get(worker.pid, ())))
            for role, worker in self._workers_on(node_id)
        ]
        return NodeLost(node_id, workers[0][1].node_ip, workers, waiting_role, awaited, reason)

    def _workers_on(self, node_id: str) -> list[tuple[str, WorkerProcess]]:
        """Returns role and process of each worker on a node."""
        return [entry for entry in self._workers.values() if entry[1].node_id == node_id]

    def _poll(self, node_id: str) -> float | None:
        """Polls the probe of a node, and returns the result of `RemoteNode.poll`."""
        workers = self._workers_on(node_id)
        return self._nodes[node_id].poll({worker.pid: worker.logs for _, worker in workers})

    def _kill_stopped_worker(
        self, role: str, worker: WorkerProcess, waiting_role: str, awaited: str
    ) -> WorkerStopped:
        """Kills a stopped worker and returns the error to raise."""
        if worker.node_id == self.local_node_id:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(worker.pid, signal.SIGKILL)
        else:
            self._nodes[worker.node_id].actor.kill.remote(worker.pid)
        return WorkerStopped(role, worker, waiting_role, awaited, self.unresponsive_timer.limit_s)


_watch: ClusterWatch | None = None
lost_node_ids: set[str] = set()
"""The ids of the nodes that were lost; a node that joins again has a new id."""


def watch_cluster(ray_pids: Mapping[str, int], log_folder: str = "") -> None:
    """Starts watching the cluster; `ray_pids` has the pids of the Ray processes that this process started."""
    global _watch
    _watch = ClusterWatch(TrainerConfig.liveness_deadline_s, ray_pids, log_folder)


def watch_workers(role: str, workers: Sequence[WorkerProcess], limit_s: float) -> None:
    """Adds the processes of a worker group to the watch."""
    if _watch is not None and _watch.local_node_id != ray.get_runtime_context().get_node_id():
        stop_watch()  # this process has since joined or started another cluster
    if _watch is None:
        watch_cluster({})
    assert _watch is not None
    _watch.add(role, workers, limit_s)


def unwatch_workers(workers: Sequence[WorkerProcess]) -> None:
    """Removes the processes of a worker group from the watch; call it before they are stopped."""
    if _watch is not None and not _watch.failed:
        _watch.remove(workers)


def stop_watch() -> None:
    """Stops watching, before this process leaves the cluster."""
    global _watch
    if _watch is not None:
        _watch.ping.close()
    _watch = None


def check_alive(waiting_role: str, awaited: str) -> None:
    """Like `ClusterWatch.check_alive`; has an effect in the trainer process only."""
    if _watch is not None:
        _watch.check_alive(waiting_role, awaited)


def refresh_logs() -> None:
    """Reads recent log lines of remote workers, at most every PING_INTERVAL_S."""
    if _watch is not None:
        _watch.refresh_logs()


def raise_if_lost(waiting_role: str, awaited: str, node_id: str | None = None) -> None:
    """Raises, in the trainer process only, if this node is lost, or with None if any worker is lost."""
    if _watch is None or _watch.failed:
        return
    if node_id is None:
        _watch.raise_if_any_lost(waiting_role, awaited)
    else:
        _watch.raise_if_node_lost(node_id, waiting_role, awaited)


def remote_log_lines(worker: WorkerProcess) -> list[str]:
    """Returns the last log lines of a process on a remote node; works in the trainer process only."""
    return _watch.log_lines(worker) if _watch is not None else ["(its log is on its node)"]


def cluster_failed() -> bool:
    """Whether Ray itself has failed, so that calls to Ray would hang."""
    return _watch is not None and _watch.failed
