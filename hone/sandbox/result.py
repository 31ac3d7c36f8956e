"""What goes into the sandbox and what comes out: the job, its limits, the verdict, the errors.

Nothing here starts a process. Limits are per run; their defaults stand here, once.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

MAX_FILES = 200  # descriptors that travel in one message are limited to 253
_CPU_BEHIND_WALL_S = 5  # a warden on a busy machine looks late: the wall limit is still the first


class SandboxError(RuntimeError):
    """The box itself failed: says nothing about the program that was to run in it."""


class SandboxUnavailable(SandboxError):
    """A layer that the configured minimum asks for is missing: nothing was run."""


class Status(str, enum.Enum):
    """How a run ended."""

    OK = "ok"
    """The program ended by itself with exit code 0."""
    ERROR = "error"
    """The program ended by itself with another exit code, or crashed."""
    TIMEOUT = "timeout"
    """Wall time or CPU time ran out."""
    MEMORY = "memory"
    """The memory limit was reached."""
    OUTPUT = "output"
    """More output than allowed; what came before the limit is kept."""
    KILLED = "killed"
    """SIGKILL or SIGTERM that none of the limits above explains."""


@dataclass(frozen=True)
class SandboxResult:
    """The verdict on one run."""

    status: Status
    exit_code: int | None
    """As a shell reports it (128 + signal); None when the box was killed from outside."""
    stdout: str
    stderr: str
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.status is Status.OK


@dataclass(frozen=True)
class Job:
    """One program with everything it may use."""

    code: str
    stdin: str = ""
    timeout_s: float = 10.0
    """Wall time from the moment the program may start."""
    cpu_s: float | None = None
    """CPU seconds a process (rounded up); None stands a little behind the wall time, which ends it."""
    memory_mb: int = 512
    """Address space of each process; with a memory cgroup also the sum over all of them."""
    output_bytes: int = 1 << 20
    """stdout and stderr together."""
    processes: int = 32
    """Processes and threads alive at one time."""
    disk_mb: int = 64
    """Size of the working directory, and of any one file in it."""
    open_files: int = 128
    """File descriptors of one process."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Relative path in the working directory → text."""
    argv: Sequence[str] = ()
    """sys.argv[1:] of the program."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "memory_mb", "output_bytes", "processes", "disk_mb"):
            if not getattr(self, name) > 0:
                raise ValueError(f"sandbox: {name}={getattr(self, name)!r} must be positive")
        if self.cpu_s is not None and not self.cpu_s > 0:
            raise ValueError(f"sandbox: cpu_s={self.cpu_s!r} must be positive, or None")
        if self.open_files < 16:
            raise ValueError(f"sandbox: open_files={self.open_files} is too few to start; use ≥ 16")
        if not math.isfinite(self.timeout_s):
            raise ValueError("sandbox: timeout_s must be finite: every run has a deadline")
        if len(self.files) > MAX_FILES:
            raise ValueError(f"sandbox: {len(self.files)} files given; at most {MAX_FILES} fit")
        for path in self.files:
            _check_relative(path)
        if any("\0" in argument for argument in self.argv):
            raise ValueError("sandbox: an argument holds a NUL character")

    @property
    def cpu_limit_s(self) -> int:
        if self.cpu_s is None:
            return math.ceil(self.timeout_s) + _CPU_BEHIND_WALL_S
        return math.ceil(self.cpu_s)


def _check_relative(path: str) -> None:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise ValueError(f"sandbox: file name {path!r} must be relative and must not climb ('..')")
    if str(PurePosixPath(path)) == "main.py":
        raise ValueError("sandbox: 'main.py' is the name of the program itself; rename the file")
