"""Reads the state and the last log lines of processes on this machine, and measures how long they
are unresponsive.

A stopped process (SIGSTOP) is unresponsive; a busy one is not.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress

STOPPED, ZOMBIE, GONE = "T", "Z", ""
LONGEST_GAP_S = 5.0
LOG_LINES = 20


def process_state(pid: int) -> str:
    """Returns the kernel's state letter of a local process; empty if the process does not exist."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return GONE


class UnresponsiveTimer:
    """Measures for how many seconds each target has been unresponsive.

    At most LONGEST_GAP_S count between two updates: the caller may have been stopped too.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._seconds: dict[Hashable, float] = {}
        self._updated_at: float | None = None

    def update(self, unresponsive: Iterable[Hashable], now: float) -> list[Hashable]:
        """Records the targets that are unresponsive now; returns those that have reached the limit."""
        gap_s = 0.0 if self._updated_at is None else min(now - self._updated_at, LONGEST_GAP_S)
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
    return tuple(target for target in targets if os.path.isabs(target))


def last_lines(paths: Sequence[str]) -> list[str]:
    """Returns the last lines of each existing file."""
    lines: list[str] = []
    for path in paths:
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                tail = deque(file, maxlen=LOG_LINES)
            # Ray marks jobs and actors with lines that start with ":".
            lines += [line.rstrip() for line in tail if line.strip() and not line.startswith(":")]
    return lines
