"""What goes wrong between processes, said so that someone can act on it.

Each names the group, the rank and the call. Leaves out errors of the worker's own code: those
arrive as they were raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GO_ON = "The same command, started again, goes on from the run's last checkpoint"


@dataclass(frozen=True)
class Seat:
    """Where one rank's process is, and where it writes its log."""

    rank: int
    pid: int
    node_ip: str
    node_id: str
    logs: tuple[str, ...]


class WorkerDied(RuntimeError):
    """A worker's process ended while something waited for it."""

    def __init__(
        self, role: str, seat: Seat, method: str, reason: str, last_lines: Sequence[str]
    ) -> None:
        self.role, self.rank, self.seat = role, seat.rank, seat
        self.method, self.reason, self.last_lines = method, reason, tuple(last_lines)
        tail = "\n".join(f"  | {line}" for line in self.last_lines) or "  | (it wrote nothing)"
        super().__init__(
            f"worker rank {seat.rank} of {role!r} (pid {seat.pid} on {seat.node_ip}) died during "
            f"{method!r}: {reason}\nits last log lines:\n{tail}\nlogs: {', '.join(seat.logs)}\n"
            f"{GO_ON}"
        )

    def __reduce__(self) -> tuple[type[WorkerDied], tuple[object, ...]]:
        return type(self), (self.role, self.seat, self.method, self.reason, self.last_lines)


class WorkerStopped(RuntimeError):
    """A worker's process is stopped (SIGSTOP) and does not work on."""

    def __init__(self, role: str, seat: Seat, owner: str, method: str, seconds: float) -> None:
        self.role, self.rank, self.seat = role, seat.rank, seat
        self.owner, self.method, self.seconds = owner, method, seconds
        super().__init__(
            f"worker rank {seat.rank} of {role!r} (pid {seat.pid} on {seat.node_ip}) has been "
            f"stopped (SIGSTOP) for {seconds:g} s, while {owner!r} waited for {method!r}; it was "
            f"ended. {GO_ON}"
        )

    def __reduce__(self) -> tuple[type[WorkerStopped], tuple[object, ...]]:
        return type(self), (self.role, self.seat, self.owner, self.method, self.seconds)


class ClusterFailed(RuntimeError):
    """A process of Ray itself, or a whole node, has ended or does not answer."""

    def __init__(self, what: str, owner: str, method: str, hint: str) -> None:
        self.what, self.owner, self.method, self.hint = what, owner, method, hint
        super().__init__(f"{what}, while {owner!r} waited for {method!r}; {hint}. {GO_ON}")

    def __reduce__(self) -> tuple[type[ClusterFailed], tuple[object, ...]]:
        return type(self), (self.what, self.owner, self.method, self.hint)


class WaitTimeout(TimeoutError):
    """A wait reached its deadline."""

    def __init__(self, owner: str, what: str, deadline_s: float, hint: str) -> None:
        self.owner, self.what, self.deadline_s, self.hint = owner, what, deadline_s, hint
        super().__init__(
            f"{owner!r} waited {deadline_s:g} s for {what}, and that is its limit; {hint}"
        )

    def __reduce__(self) -> tuple[type[WaitTimeout], tuple[object, ...]]:
        return type(self), (self.owner, self.what, self.deadline_s, self.hint)


class RemoteTraceback(Exception):
    """Where in another process an error was raised; the cause of the error that is raised here."""
