"""Reads the state and the last log lines of processes on this machine.

UnresponsiveTimer measures for how long processes and other targets have been unresponsive. A
stopped process (SIGSTOP) is unresponsive; a busy one is not.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress

STOPPED, ZOMBIE, GONE = "T", "Z", ""
"""Process states: the letters of /proc/PID/stat, and empty for a process that does not exist."""
MAX_UPDATE_GAP_S = 5.0
MAX_LOG_LINES = 20
MAX_LOG_BYTES = 1 << 16


def process_state(pid: int) -> str:
    """Returns the state letter of a process on this machine, or GONE."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return GONE


class UnresponsiveTimer:
    """Measures for how many seconds each target has been unresponsive.

    Between two updates, at most MAX_UPDATE_GAP_S are counted: the caller itself may have been stopped.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._seconds: dict[Hashable, float] = {}
        self._updated_at: float | None = None

    def update(self, unresponsive: Iterable[Hashable], now: float) -> list[Hashable]:
        """Records which targets are unresponsive now; returns the targets that have reached the limit."""
        gap_s = 0.0 if self._updated_at is None else min(now - self._updated_at, MAX_UPDATE_GAP_S)
        self._updated_at = now
        self._seconds = {
            target: self._seconds[target] + gap_s if target in self._seconds else 0.0
            for target in unresponsive
        }
        return [target for target, seconds in self._seconds.items() if seconds >= self.limit_s]


def own_log_files() -> tuple[str, ...]:
    """Returns the files that stderr and stdout of this process are redirected to."""
    targets = []
    for fd in (2, 1):
        with suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return tuple(target for target in targets if os.path.isfile(target))


def last_lines(paths: Sequence[str]) -> list[str]:
    """Returns the last MAX_LOG_LINES lines of each readable file, in one list."""
    lines: list[str] = []
    for path in paths:
        with suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_LOG_BYTES))
            tail = file.read(MAX_LOG_BYTES).decode(errors="replace").splitlines()[-MAX_LOG_LINES:]
            # Ray marks jobs and actors with lines that start with ":".
            lines += [line.rstrip() for line in tail if line.strip() and not line.startswith(":")]
    return lines


class NodeProbe:
    """An actor that reads processes and logs of a remote node, whose workers may be too busy to answer."""

    def __init__(self) -> None:
        self._log_sizes: dict[int, int] = {}

    def read(
        self, logs: Mapping[int, Sequence[str]]
    ) -> tuple[dict[int, str], dict[int, list[str]]]:
        """Returns the state of each process, and the last lines of each log that has changed."""
        log_lines = {}
        for pid, paths in logs.items():
            size = sum(os.path.getsize(path) for path in paths if os.path.exists(path))
            if size != self._log_sizes.get(pid):
                self._log_sizes[pid] = size
                log_lines[pid] = last_lines(paths)
        return {pid: process_state(pid) for pid in logs}, log_lines

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def log_lines(self, paths: Sequence[str]) -> list[str]:
        return last_lines(paths)
