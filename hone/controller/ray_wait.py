"""Waiting for calls on Ray: results in rank order, and what went wrong with a process said.

Leaves out who lives and who is stopped: the watch over the cluster is asked while waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from hone.controller.failures import RemoteTraceback, Seat, WaitTimeout, WorkerDied
from hone.controller.processes import last_lines
from hone.controller.ray_liveness import lines_of_another_node, look
from hone.controller.waiting import tell

LOOK_EVERY_S = 1.0
DEATH_IS_KNOWN_AFTER_S = 3.0


@dataclass(frozen=True)
class RefWait:
    """Waits for the results of one call; picklable, so that a future can be resolved anywhere."""

    owner: str
    method: str
    seats: tuple[Seat, ...]
    deadline_s: float
    advice: str
    """How the deadline is raised: the end of the message."""
    record: Callable[[str, float], None] | None = None
    """Takes note of how long the call took; in the loop's process alone it is heard."""

    def __call__(self, refs: Sequence[ray.ObjectRef]) -> list[Any]:
        """Results in rank order; the first failure of any rank is raised as soon as it is known."""
        started = time.monotonic()
        ends = started + self.deadline_s
        rank_of = {ref: rank for rank, ref in enumerate(refs)}
        results: dict[int, Any] = {}
        pending = list(refs)
        while pending:
            left = max(0.0, ends - time.monotonic())
            ready, pending = ray.wait(pending, num_returns=1, timeout=min(left, LOOK_EVERY_S))
            if not ready:
                look(self.owner, self.method)
                if left <= LOOK_EVERY_S:
                    raise self._too_late([rank_of[ref] for ref in pending])
            for ref in ready:
                rank = rank_of[ref]
                left = max(1.0, ends - time.monotonic())
                try:
                    results[rank] = self._result(ref, rank, left)
                except Exception:  # it may have failed because a peer of it died: that is the cause
                    self._raise_death(pending, rank_of)
                    raise
            tell(len(results), len(refs))
        if self.record is not None:
            self.record(self.method, time.monotonic() - started)
        return [results[rank] for rank in range(len(refs))]

    def _raise_death(self, pending: list[ray.ObjectRef], rank_of: dict[ray.ObjectRef, int]) -> None:
        ends = time.monotonic() + DEATH_IS_KNOWN_AFTER_S
        while pending and (left := ends - time.monotonic()) > 0:
            ready, pending = ray.wait(pending, num_returns=1, timeout=left)
            for ref in ready:
                try:
                    ray.get(ref, timeout=1.0)
                except (RayTaskError, GetTimeoutError):
                    continue
                except RayError as error:
                    seat = self._seat(rank_of[ref])
                    raise died(self.owner, seat, self.method, error) from error

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
        except RayError as error:  # the process died, or its result went with its node or owner
            look(self.owner, self.method)  # a worker dies with Ray: that is then the cause
            raise died(self.owner, self._seat(rank), self.method, error) from error

    def _seat(self, rank: int) -> Seat:
        return self.seats[rank] if rank < len(self.seats) else Seat(rank, 0, "its node", "", ())

    def _too_late(self, ranks: list[int]) -> WaitTimeout:
        where = [f"rank {r} (pid {self._seat(r).pid} on {self._seat(r).node_ip})" for r in ranks]
        return WaitTimeout(
            self.owner,
            f"{self.method!r} on {', '.join(where)}",
            self.deadline_s,
            "the process lives but has not answered: look at its stack with py-spy, or "
            f"{self.advice}",
        )


def died(owner: str, seat: Seat, method: str, error: Exception) -> WorkerDied:
    """The report on a dead process: why it died, as far as Ray knows, and what it wrote last."""
    return WorkerDied(owner, seat, method, _reason(str(error)), last_log_lines(seat))


def _reason(text: str) -> str:
    """Ray's account of a death in our words where they are known, else its own."""
    start = text.find("Worker exit detail:")
    detail = text[start + len("Worker exit detail:") :] if start >= 0 else text
    detail = " ".join(detail.split("Some common causes")[0].split()).rstrip(". ")
    if "node has crashed" in detail or "node has died" in detail or "node was terminated" in detail:
        return "Ray lost its node: the machine, its network or its raylet failed"
    if "connection error" in detail:  # all that is known of a process that is gone
        return "its process is gone; killed for memory, crashed, or stopped from outside"
    return detail


def last_log_lines(seat: Seat) -> list[str]:
    """What a process wrote last; read on its node where that is another."""
    if not seat.logs:
        return []
    if ray.get_runtime_context().get_node_id() == seat.node_id:
        return last_lines(seat.logs)
    return lines_of_another_node(seat)
