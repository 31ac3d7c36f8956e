"""Reads the states and logs of worker processes on a remote node, through an actor that runs there."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hone.controller.processes import last_lines, process_state


class _NodeProbe:
    """The actor on the remote node. A worker itself could not answer while it is busy."""

    def __init__(self) -> None:
        self._log_sizes: dict[int, int] = {}

    def read(
        self, logs: Mapping[int, Sequence[str]]
    ) -> tuple[dict[int, str], dict[int, list[str]]]:
        """Returns the state of each process, and the last lines of each log that has changed."""
        log_lines = {}
        for pid, paths in logs.items():
            size = sum(os.path.getsize(path) for path in paths if os.path.exists(path))
            if size != self._log_sizes.get(pid):
                self._log_sizes[pid] = size
                log_lines[pid] = last_lines(paths)
        return {pid: process_state(pid) for pid in logs}, log_lines

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def log_lines(self, paths: Sequence[str]) -> list[str]:
        return last_lines(paths)


class RemoteNode:
    """A remote node, in the state that its probe last reported."""

    def __init__(self, node_id: str) -> None:
        strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
        options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": strategy}
        self.actor = ray.remote(_NodeProbe).options(**options).remote()
        self.answer_count = 0
        """The number of answers of the probe so far."""
        self.states: dict[int, str] = {}
        """The state of each process by pid."""
        self.log_lines: dict[int, list[str]] = {}
        """The last log lines by pid; they can be read after the node is lost."""
        self._request: tuple[ray.ObjectRef, float] | None = None

    def poll(self, logs: Mapping[int, Sequence[str]]) -> float | None:
        """Reads the answer to the last request, if it has arrived, and sends the next request.

        Returns the time at which the answered request was sent, or None.
        """
        sent_at = None
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
