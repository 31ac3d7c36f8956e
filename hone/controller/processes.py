"""Processes of this machine: their state, how long one has been silent, and their last log lines.

A process that works, however long, is never silent; a stopped one (SIGSTOP) is. A probe on their node
reads processes of other machines.
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
    """The kernel's state letter of a process of this machine; empty where there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return GONE


class Silence:
    """Seconds for which each target was silent, counted while the caller looks.

    At most LONGEST_GAP_S count between two looks: a caller that was busy or stopped has seen nothing.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._seconds: dict[Hashable, float] = {}
        self._looked_at: float | None = None

    def look(self, silent: Iterable[Hashable], now: float) -> list[Hashable]:
        """Record the targets that are silent now; return those that have been for the whole limit."""
        passed = 0.0 if self._looked_at is None else min(now - self._looked_at, LONGEST_GAP_S)
        self._looked_at = now
        self._seconds = {
            target: self._seconds[target] + passed if target in self._seconds else 0.0
            for target in silent
        }
        return [target for target, seconds in self._seconds.items() if seconds >= self.limit_s]


def own_log_files() -> tuple[str, ...]:
    """The files that stderr and stdout of this process go to, where they go to files."""
    targets = []
    for fd in (2, 1):
        with suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return tuple(target for target in targets if os.path.isabs(target))


def last_lines(paths: Sequence[str]) -> list[str]:
    """The last lines of each of these files that exists."""
    lines: list[str] = []
    for path in paths:
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                tail = deque(file, maxlen=LOG_LINES)
            # Ray writes markers of its own for finding jobs and actors in the file.
            lines += [line.rstrip() for line in tail if line.strip() and not line.startswith(":")]
    return lines
