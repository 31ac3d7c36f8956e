"""From how a box ended to the verdict on its program: exit code, limits, and what the kernel killed."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from hone.sandbox.result import Status


@dataclass(frozen=True)
class Ending:
    """The facts about one ended run."""

    exit: int | None
    """As waitpid says it: negative for a signal; None when it was never seen to end."""
    limit: Status | None
    """The limit for which the warden killed it."""
    out_of_memory: bool
    """The kernel killed something in its cgroup for memory."""
    stderr: bytes

    @property
    def exit_code(self) -> int | None:
        """As a shell reports it; None when a limit ended the run."""
        if self.limit is not None or self.exit is None:
            return None
        return self.exit if self.exit >= 0 else 128 - self.exit

    @property
    def status(self) -> Status:
        code = self.exit_code
        if self.out_of_memory:
            return Status.MEMORY
        if self.limit is not None:
            return self.limit
        if code == 0:
            return Status.OK
        if code == 128 + signal.SIGXCPU:
            return Status.TIMEOUT
        if code in (None, 128 + signal.SIGKILL, 128 + signal.SIGTERM):
            return Status.KILLED
        last_line = self.stderr.rstrip().rpartition(b"\n")[2]
        return Status.MEMORY if last_line.startswith(b"MemoryError") else Status.ERROR
