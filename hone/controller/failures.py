"""Errors about lost processes, lost nodes and passed deadlines.

Each error names the worker group, the rank and the method. Exceptions of worker code are
re-raised unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.errors import UserError

LOST_NODE_LOG_LINES = 8
"""Maximum number of log lines per worker of a lost node, which may have had many workers."""
RESUME_HINT = (
    "Run the same command again to resume from the last checkpoint "
    "(with trainer.resume_mode=auto, the default)"
)


@dataclass(frozen=True)
class WorkerProcess:
    """The process of one rank: its location and log files."""

    rank: int
    pid: int
    node_ip: str
    node_id: str
    logs: tuple[str, ...]


class ProcessFailure(UserError, RuntimeError):
    """A process of the run was lost; the run can resume from its last checkpoint."""

    may_restart = True
    """Whether the run may restart itself; False after a request to stop."""


@dataclass(eq=False)
class WorkerDied(ProcessFailure):
    """A worker process ended while a caller waited for it."""

    role: str
    process: WorkerProcess
    method: str
    reason: str
    last_lines: Sequence[str]

    def __str__(self) -> str:
        return (
            f"worker rank {self.process.rank} of {self.role!r} (pid {self.process.pid} on "
            f"{self.process.node_ip}) died during {self.method!r}: {self.reason}\n"
            f"its last log lines:\n{_log_tail(self.last_lines)}\n"
            f"logs: {', '.join(self.process.logs)}\n{RESUME_HINT}"
        )


@dataclass(eq=False)
class WorkerStopped(ProcessFailure):
    """A worker process was stopped (SIGSTOP)."""

    role: str
    process: WorkerProcess
    waiting_role: str
    awaited: str
    """The method or the resource that `waiting_role` waited for."""
    seconds: float

    def __str__(self) -> str:
        return (
            f"worker rank {self.process.rank} of {self.role!r} (pid {self.process.pid} on "
            f"{self.process.node_ip}) has been stopped (SIGSTOP) for {self.seconds:g} s, while "
            f"{self.waiting_role!r} waited for {self.awaited!r}; it was killed. {RESUME_HINT}"
        )


@dataclass(eq=False)
class ClusterFailed(ProcessFailure):
    """A process of Ray itself (the GCS or a raylet) has ended or does not respond."""

    event: str
    waiting_role: str
    awaited: str
    hint: str

    def __str__(self) -> str:
        wait = f"{self.waiting_role!r} waited for {self.awaited!r}"
        return f"{self.event}, while {wait}; {self.hint}. {RESUME_HINT}"


@dataclass(eq=False)
class NodeLost(ProcessFailure):
    """A node of the Ray cluster failed, with every worker on it."""

    node_id: str
    node_ip: str
    workers: Sequence[tuple[str, WorkerProcess, Sequence[str]]]
    """Role, location and last log lines of each worker on the node."""
    waiting_role: str
    awaited: str
    reason: str

    def __str__(self) -> str:
        ranks_by_role: dict[str, list[str]] = {}
        for role, process, _ in self.workers:
            ranks_by_role.setdefault(role, []).append(str(process.rank))
        workers = [
            f"{'rank' if len(ranks) == 1 else 'ranks'} {join_words(ranks)} of {role!r}"
            for role, ranks in ranks_by_role.items()
        ]
        text = (
            f"node {self.node_ip} (id {self.node_id[:12]}) was lost with {join_words(workers)}, while "
            f"{self.waiting_role!r} waited for {self.awaited!r}: {self.reason}"
        )
        for role, process, lines in self.workers:
            text += f"\nlast log lines of rank {process.rank} of {role!r} (pid {process.pid}):\n"
            text += _log_tail(lines[-LOST_NODE_LOG_LINES:])
        return f"{text}\n{RESUME_HINT}"


def _log_tail(lines: Sequence[str]) -> str:
    return "\n".join(f"  | {line}" for line in lines) or "  | (it wrote nothing)"


def join_words(words: Sequence[str]) -> str:
    """Returns the words as in "a, b and c"."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


class WaitTimeout(UserError, TimeoutError):
    """A role waited for something until its deadline."""

    def __init__(self, waiting_role: str, awaited: str, deadline_s: float, hint: str) -> None:
        self.waiting_role, self.awaited = waiting_role, awaited
        self.deadline_s, self.hint = deadline_s, hint
        super().__init__(
            f"{waiting_role!r} waited {deadline_s:g} s for {awaited} and reached its deadline; {hint}"
        )

    def __reduce__(self) -> tuple[type[WaitTimeout], tuple[str, str, float, str]]:
        return type(self), (self.waiting_role, self.awaited, self.deadline_s, self.hint)


class RemoteTraceback(Exception):
    """The traceback of a worker's exception, set as the cause of the re-raised exception."""
