"""Waits for Ray calls: returns results in rank order, or raises a worker's failure."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from hone.controller.failures import (
    ProcessFailure,
    RemoteTraceback,
    WaitTimeout,
    WorkerDied,
    WorkerProcess,
)
from hone.controller.processes import last_lines
from hone.controller.progress import report_progress
from hone.controller.ray_liveness import check_alive, raise_if_lost, refresh_logs, remote_log_lines

POLL_INTERVAL_S = 1.0
DEATH_REPORT_DEADLINE_S = 3.0
_NODE_DEATH_PATTERN = re.compile("node (has crashed|has died|was terminated)")


@dataclass(frozen=True)
class RefWait:
    """Waits for the results of one call; picklable, because any process may resolve a future."""

    role: str
    method: str
    processes: tuple[WorkerProcess, ...]
    deadline_s: float
    advice: str
    """Says how to raise the deadline; the error message ends with it."""
    record: Callable[[str, float], None] | None = None
    """Records the duration of the call; it has an effect in the trainer process only."""

    def __call__(self, refs: Sequence[ray.ObjectRef]) -> list[Any]:
        """Returns the results in rank order; raises the first failure of a rank at once."""
        start_time = time.monotonic()
        end_time = start_time + self.deadline_s
        rank_by_ref = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        pending = list(refs)
        while pending:
            remaining_s = max(0.0, end_time - time.monotonic())
            ready, pending = ray.wait(
                pending, num_returns=1, timeout=min(remaining_s, POLL_INTERVAL_S)
            )
            if not ready:
                check_alive(self.role, self.method)
                if remaining_s <= POLL_INTERVAL_S:
                    raise self._timeout_error([rank_by_ref[ref] for ref in pending])
            for ref in ready:
                rank = rank_by_ref[ref]
                remaining_s = max(1.0, end_time - time.monotonic())
                try:
                    results[rank] = self._result(ref, rank, remaining_s)
                except Exception as error:  # the death of another process may be the cause
                    self._raise_other_death(pending, rank_by_ref)
                    if not isinstance(error, ProcessFailure):
                        raise_if_lost(self.role, self.method)
                    raise
            report_progress(len(results), len(refs))
        refresh_logs()
        if self.record is not None:
            self.record(self.method, time.monotonic() - start_time)
        return [results[rank] for rank in range(len(refs))]

    def _raise_other_death(
        self, pending: list[ray.ObjectRef], rank_by_ref: dict[ray.ObjectRef, int]
    ) -> None:
        """Raises WorkerDied if Ray reports within DEATH_REPORT_DEADLINE_S that another rank died."""
        end_time = time.monotonic() + DEATH_REPORT_DEADLINE_S
        while pending and (remaining_s := end_time - time.monotonic()) > 0:
            ready, pending = ray.wait(pending, num_returns=1, timeout=remaining_s)
            for ref in ready:
                try:
                    ray.get(ref, timeout=1.0)
                except (RayTaskError, GetTimeoutError):
                    continue
                except RayError as error:
                    raise self.death_error(rank_by_ref[ref], error) from error

    def _result(self, ref: ray.ObjectRef, rank: int, timeout_s: float) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except RayTaskError as error:
            message = f"rank {rank} of {self.role!r} raised in {self.method!r}:\n{error}"
            cause = getattr(error, "cause", None)
            if isinstance(cause, Exception) and not isinstance(cause, RayTaskError):
                raise cause from RemoteTraceback(message)
            raise RuntimeError(message) from error
        except GetTimeoutError as error:
            raise self._timeout_error([rank]) from error
        except RayError as error:  # the process died, or its result was lost with its node or owner
            check_alive(self.role, self.method)  # raises if Ray itself failed
            raise self.death_error(rank, error) from error

    def _process(self, rank: int) -> WorkerProcess:
        if rank < len(self.processes):
            return self.processes[rank]
        return WorkerProcess(rank, 0, "its node", "", ())  # has not reported its location yet

    def death_error(self, rank: int, error: Exception) -> WorkerDied:
        """Returns the error about a dead worker; raises NodeLost if its node is lost."""
        process = self._process(rank)
        # A raylet reports the death of a worker. Without a report, the node itself may have failed.
        if "Worker exit detail:" not in str(error) or _NODE_DEATH_PATTERN.search(str(error)):
            raise_if_lost(self.role, self.method, process.node_id)
        _, _, detail = str(error).rpartition("Worker exit detail:")
        detail = " ".join(detail.split("Some common causes")[0].split()).rstrip(". ")
        if _NODE_DEATH_PATTERN.search(detail):
            detail = "Ray lost its node: the machine, its network or its raylet failed"
        elif "connection error" in detail:  # Ray gives no other reason
            detail = "its process has ended: out of memory, a crash, or a signal from outside"
        lines: list[str] = []
        if process.logs:
            is_local = ray.get_runtime_context().get_node_id() == process.node_id
            lines = last_lines(process.logs) if is_local else remote_log_lines(process)
        return WorkerDied(self.role, process, self.method, detail, lines)

    def _timeout_error(self, ranks: list[int]) -> WaitTimeout:
        processes = [self._process(rank) for rank in ranks]
        locations = [f"rank {p.rank} (pid {p.pid} on {p.node_ip})" for p in processes]
        return WaitTimeout(
            self.role,
            f"{self.method!r} on {', '.join(locations)}",
            self.deadline_s,
            f"the process is alive but has not answered: see its stack with py-spy, or {self.advice}",
        )
