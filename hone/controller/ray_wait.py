"""Waits for Ray calls: returns results in rank order, or raises a worker's failure with its cause.

The cluster watch (ray_liveness.py) is consulted while waiting.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from hone.controller.failures import ProcessFailure, RemoteTraceback, Seat, WaitTimeout, WorkerDied
from hone.controller.processes import last_lines
from hone.controller.ray_liveness import lines_of_another_node, look, raise_if_lost, refresh
from hone.controller.waiting import tell

LOOK_EVERY_S = 1.0
DEATH_IS_KNOWN_AFTER_S = 3.0
_NODE_DEATH = re.compile("node (has crashed|has died|was terminated)")


@dataclass(frozen=True)
class RefWait:
    """Waits for the results of one call; picklable, so that any process can resolve a future."""

    owner: str
    method: str
    seats: tuple[Seat, ...]
    deadline_s: float
    advice: str
    """How to raise the deadline; appended to the error message."""
    record: Callable[[str, float], None] | None = None
    """Records the duration of the call; has an effect in the trainer process only."""

    def __call__(self, refs: Sequence[ray.ObjectRef]) -> list[Any]:
        """Returns results in rank order; raises the first failure of any rank as soon as it is known."""
        started = time.monotonic()
        end_time = started + self.deadline_s
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        pending = list(refs)
        while pending:
            left = max(0.0, end_time - time.monotonic())
            ready, pending = ray.wait(pending, num_returns=1, timeout=min(left, LOOK_EVERY_S))
            if not ready:
                look(self.owner, self.method)
                if left <= LOOK_EVERY_S:
                    raise self._too_late([rank_of[ref] for ref in pending])
            for ref in ready:
                rank = rank_of[ref]
                left = max(1.0, end_time - time.monotonic())
                try:
                    results[rank] = self._result(ref, rank, left)
                except Exception as error:  # the cause may be the death of another process
                    self._raise_death(pending, rank_of)
                    if not isinstance(error, ProcessFailure):
                        raise_if_lost(self.owner, self.method)
                    raise
            tell(len(results), len(refs))
        refresh()
        if self.record is not None:
            self.record(self.method, time.monotonic() - started)
        return [results[rank] for rank in range(len(refs))]

    def _raise_death(self, pending: list[ray.ObjectRef], rank_of: dict[ray.ObjectRef, int]) -> None:
        end_time = time.monotonic() + DEATH_IS_KNOWN_AFTER_S
        while pending and (left := end_time - time.monotonic()) > 0:
            ready, pending = ray.wait(pending, num_returns=1, timeout=left)
            for ref in ready:
                try:
                    ray.get(ref, timeout=1.0)
                except (RayTaskError, GetTimeoutError):
                    continue
                except RayError as error:
                    raise self.died(rank_of[ref], error) from error

    def _result(self, ref: ray.ObjectRef, rank: int, timeout_s: float) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except RayTaskError as error:
            where = f"rank {rank} of {self.owner!r} raised in {self.method!r}:\n{error}"
            cause = getattr(error, "cause", None)
            if isinstance(cause, Exception) and not isinstance(cause, RayTaskError):
                raise cause from RemoteTraceback(where)
            raise RuntimeError(where) from error
        except GetTimeoutError as error:
            raise self._too_late([rank]) from error
        except RayError as error:  # the process died, or its result was lost with its node or owner
            look(self.owner, self.method)  # if Ray itself failed, that is the cause
            raise self.died(rank, error) from error

    def _seat(self, rank: int) -> Seat:
        return self.seats[rank] if rank < len(self.seats) else Seat(rank, 0, "its node", "", ())

    def died(self, rank: int, error: Exception) -> WorkerDied:
        """Returns an error with Ray's reason for the death and the last log lines, or raises NodeLost."""
        seat = self._seat(rank)
        # Ray's node managers report deaths. Without a report, the node itself may have failed.
        if "Worker exit detail:" not in str(error) or _NODE_DEATH.search(str(error)):
            raise_if_lost(self.owner, self.method, seat.node_id)
        _, _, detail = str(error).rpartition("Worker exit detail:")
        detail = " ".join(detail.split("Some common causes")[0].split()).rstrip(". ")
        if _NODE_DEATH.search(detail):
            detail = "Ray lost its node: the machine, its network or its raylet failed"
        elif "connection error" in detail:  # Ray knows no more than that
            detail = "its process is gone; killed for memory, crashed, or stopped from outside"
        lines: list[str] = []
        if seat.logs:
            here = ray.get_runtime_context().get_node_id() == seat.node_id
            lines = last_lines(seat.logs) if here else lines_of_another_node(seat)
        return WorkerDied(self.owner, seat, self.method, detail, lines)

    def _too_late(self, ranks: list[int]) -> WaitTimeout:
        where = [f"rank {r} (pid {self._seat(r).pid} on {self._seat(r).node_ip})" for r in ranks]
        return WaitTimeout(
            self.owner,
            f"{self.method!r} on {', '.join(where)}",
            self.deadline_s,
            "the process lives but has not answered: look at its stack with py-spy, or "
            f"{self.advice}",
        )
