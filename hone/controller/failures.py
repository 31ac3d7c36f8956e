"""Errors of processes, each with the worker group, the rank and the method.

Exceptions of worker code are re-raised unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GO_ON = "The same command, started again, goes on from the run's last checkpoint"


@dataclass(frozen=True)
class Seat:
    """The location and the log files of one rank's process."""

    rank: int
    pid: int
    node_ip: str
    node_id: str
    logs: tuple[str, ...]


@dataclass(eq=False)
class WorkerDied(RuntimeError):
    """A worker process ended while a caller waited for it."""

    role: str
    seat: Seat
    method: str
    reason: str
    last_lines: Sequence[str]

    def __str__(self) -> str:
        tail = "\n".join(f"  | {line}" for line in self.last_lines) or "  | (it wrote nothing)"
        return (
            f"worker rank {self.seat.rank} of {self.role!r} (pid {self.seat.pid} on "
            f"{self.seat.node_ip}) died during {self.method!r}: {self.reason}\n"
            f"its last log lines:\n{tail}\nlogs: {', '.join(self.seat.logs)}\n{GO_ON}"
        )


@dataclass(eq=False)
class WorkerStopped(RuntimeError):
    """A worker process was stopped (SIGSTOP)."""

    role: str
    seat: Seat
    owner: str
    method: str
    seconds: float

    def __str__(self) -> str:
        return (
            f"worker rank {self.seat.rank} of {self.role!r} (pid {self.seat.pid} on "
            f"{self.seat.node_ip}) has been stopped (SIGSTOP) for {self.seconds:g} s, while "
            f"{self.owner!r} waited for {self.method!r}; it was ended. {GO_ON}"
        )


@dataclass(eq=False)
class ClusterFailed(RuntimeError):
    """A Ray process or a node has ended or does not respond."""

    what: str
    owner: str
    method: str
    hint: str

    def __str__(self) -> str:
        return f"{self.what}, while {self.owner!r} waited for {self.method!r}; {self.hint}. {GO_ON}"


class WaitTimeout(TimeoutError):
    """A wait reached its deadline."""

    def __init__(self, owner: str, what: str, deadline_s: float, hint: str) -> None:
        self.owner, self.what, self.deadline_s, self.hint = owner, what, deadline_s, hint
        super().__init__(
            f"{owner!r} waited {deadline_s:g} s for {what}, and that is its limit; {hint}"
        )

    def __reduce__(self) -> tuple[type[WaitTimeout], tuple[str, str, float, str]]:
        return type(self), (self.owner, self.what, self.deadline_s, self.hint)


class RemoteTraceback(Exception):
    """The traceback of a worker's exception; set as the cause of the exception that is re-raised."""
