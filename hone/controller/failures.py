"""Errors of processes, each with the worker group, the rank and the method.

Exceptions of worker code are re-raised unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LAST_LINES = 8
"""Log lines per worker of a lost node; a node may have had many workers."""
GO_ON = "The same command, started again, goes on from the run's last checkpoint"


@dataclass(frozen=True)
class Seat:
    """The location and the log files of one rank's process."""

    rank: int
    pid: int
    node_ip: str
    node_id: str
    logs: tuple[str, ...]


class ProcessFailure(RuntimeError):
    """A process of the run was lost; a new start on what is left can go on from the last checkpoint."""

    may_restart = True
    """Whether the run may start again by itself: not if it was asked to stop."""


@dataclass(eq=False)
class WorkerDied(ProcessFailure):
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
class WorkerStopped(ProcessFailure):
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
class ClusterFailed(ProcessFailure):
    """A process of Ray has ended or does not respond."""

    what: str
    owner: str
    method: str
    hint: str

    def __str__(self) -> str:
        return f"{self.what}, while {self.owner!r} waited for {self.method!r}; {self.hint}. {GO_ON}"


@dataclass(eq=False)
class NodeLost(ProcessFailure):
    """A node of the Ray cluster failed, with every worker on it."""

    node_id: str
    node_ip: str
    workers: Sequence[tuple[str, Seat, Sequence[str]]]
    """Role, location and last log lines of each worker that ran there."""
    owner: str
    method: str
    reason: str

    def __str__(self) -> str:
        ranks: dict[str, list[str]] = {}
        for role, seat, _ in self.workers:
            ranks.setdefault(role, []).append(str(seat.rank))
        who = [
            f"rank{'s' * (len(numbers) > 1)} {joined(numbers)} of {role!r}"
            for role, numbers in ranks.items()
        ]
        text = (
            f"node {self.node_ip} (id {self.node_id[:12]}) was lost with {joined(who)}, while "
            f"{self.owner!r} waited for {self.method!r}: {self.reason}"
        )
        for role, seat, lines in self.workers:
            tail = "\n".join(f"  | {line}" for line in lines[-LAST_LINES:])
            text += f"\nlast log lines of rank {seat.rank} of {role!r} (pid {seat.pid}):\n"
            text += tail or "  | (it wrote nothing)"
        return f"{text}\n{GO_ON}"


def joined(words: Sequence[str]) -> str:
    """Returns "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


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
