"""The input and output of the sandbox: the job with its limits, the result, and the errors."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TypedDict

MAX_TIMEOUT_S = 86_400.0
MAX_FILES = 200  # one message can carry at most 253 descriptors
RANGES: dict[str, tuple[float, float]] = {
    "timeout_s": (0.0, MAX_TIMEOUT_S),
    "memory_mb": (1, 1 << 20),
    "output_bytes": (1, 1 << 30),
    "processes": (1, 1 << 15),
    "disk_mb": (1, 1 << 20),
    "open_files": (16, 1 << 16),
}
"""The range of every limit of a run; the upper bounds are finite, so that every run ends."""
# Even if a busy warden checks the wall time late, `timeout_s` ends a run before the CPU limit does.
_CPU_MARGIN_S = 5


class SandboxError(RuntimeError):
    """The box failed, which is not the fault of the program."""


class SandboxUnavailable(SandboxError):
    """This machine lacks a required layer; nothing has run."""


class NotStarted(SandboxError):
    """The box or its warden was killed before the program started; nothing has run."""


class Status(str, enum.Enum):
    """How a run ended."""

    OK = "ok"
    """The program exited with code 0."""
    ERROR = "error"
    """The program exited with another code."""
    TIMEOUT = "timeout"
    """Wall time or CPU time ran out."""
    MEMORY = "memory"
    """The memory limit was reached."""
    OUTPUT = "output"
    """The output limit was reached; the result has the output before the limit."""
    KILLED = "killed"
    """SIGKILL or SIGTERM ended the program, for none of the reasons above."""

    @classmethod
    def of_failed_program(cls, stderr: bytes) -> Status:
        """Returns MEMORY if an uncaught MemoryError ended the program, otherwise ERROR."""
        text = stderr.rstrip()
        # Python 3.13 and later may lack the memory to print the exception's own line.
        is_memory_error = text.rpartition(b"\n")[2].startswith(b"MemoryError") or text.endswith(
            b"MemoryError()\nlost sys.stderr"
        )
        return cls.MEMORY if is_memory_error else cls.ERROR


@dataclass(frozen=True)
class SandboxResult:
    """The result of one run."""

    status: Status
    exit_code: int | None
    """The exit code of the program, or 128 + the signal; None if the warden killed the box."""
    stdout: str
    stderr: str
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.status is Status.OK


class JobFields(TypedDict, total=False):
    """The fields of Job except its code, as keyword arguments."""

    stdin: str
    timeout_s: float
    cpu_s: float | None
    memory_mb: int
    output_bytes: int
    processes: int
    disk_mb: int
    open_files: int
    files: Mapping[str, str]
    argv: Sequence[str]


@dataclass(frozen=True)
class Job:
    """One program with its limits and input."""

    code: str
    stdin: str = ""
    timeout_s: float = 10.0
    """Wall time, measured from the start of the program."""
    cpu_s: float | None = None
    """CPU seconds per process, rounded up; None means timeout_s plus a margin."""
    memory_mb: int = 512
    """Address space of each process; with a memory cgroup, also the memory of all processes."""
    output_bytes: int = 1 << 20
    """Total size of stdout and stderr."""
    processes: int = 32
    """Largest number of concurrent processes and threads."""
    disk_mb: int = 64
    """Limit on the size of the working directory and of each file."""
    open_files: int = 128
    """File descriptors per process."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by their path in the working directory."""
    argv: Sequence[str] = ()
    """The arguments of the program, `sys.argv[1:]`."""

    def __post_init__(self) -> None:
        for name, bounds in RANGES.items():
            check_number(name, getattr(self, name), *bounds)
        if self.cpu_s is not None:
            check_number("cpu_s", self.cpu_s, 0.0, MAX_TIMEOUT_S)
        texts = {"code": self.code, "stdin": self.stdin}
        texts |= {f"file {path!r}": text for path, text in self.files.items()}
        for name, text in texts.items():
            if not isinstance(text, str):
                raise ValueError(f"sandbox: {name} must be text, not {type(text).__name__}")
        if len(self.files) > MAX_FILES:
            raise ValueError(
                f"sandbox: {len(self.files)} files given; at most {MAX_FILES} are allowed"
            )
        for path in self.files:
            _check_text("a file name", path)
            components = PurePosixPath(path).parts
            if not components or path.startswith("/") or ".." in components:
                raise ValueError(f"sandbox: file name {path!r} must be relative, without '..'")
            if components == ("main.py",):
                raise ValueError("sandbox: 'main.py' is the name of the program itself; rename it")
        for argument in self.argv:
            _check_text("an argument", argument)

    @property
    def cpu_limit_s(self) -> int:
        if self.cpu_s is None:
            return math.ceil(self.timeout_s) + _CPU_MARGIN_S
        return math.ceil(self.cpu_s)


def check_number(name: str, value: float, lowest: float, highest: float) -> None:
    """Raises ValueError unless the value is in the range, and an int if `highest` is an int."""
    is_integer = isinstance(highest, int)
    if isinstance(value, bool) or not isinstance(value, int if is_integer else (int, float)):
        expected = "an integer" if is_integer else "a number"
        raise ValueError(f"sandbox: {name}={value!r:.80} must be {expected}")
    if not (value > 0 and lowest <= value <= highest):
        lower_bound = "above 0" if lowest <= 0 else f"at least {lowest}"
        raise ValueError(
            f"sandbox: {name}={value!r:.80} must be {lower_bound} and at most {highest}"
        )


def _check_text(name: str, text: str) -> None:
    if not isinstance(text, str) or "\0" in text:
        raise ValueError(f"sandbox: {name} must be text without NUL, not {text!r:.80}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"sandbox: {name} contains a lone surrogate: {text!r:.80}") from None
