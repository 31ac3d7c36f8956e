"""Where a process writes its log, and what it wrote last.

Plain files of one machine. Leaves out reaching another machine: the Ray controller sends the reader
there.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

LOG_LINES = 20


def own_log_files() -> tuple[str, ...]:
    """The files this process's stderr and stdout go to, where they go to files."""
    targets = (_link(f"/proc/self/fd/{fd}") for fd in (2, 1))
    return tuple(target for target in targets if os.path.isabs(target))


def last_lines(paths: Sequence[str]) -> list[str]:
    """The last lines of each file that is there."""
    lines: list[str] = []
    for path in paths:
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                kept = deque(file, maxlen=LOG_LINES)
            # Ray writes markers of its own for finding jobs and actors in the file.
            lines += [line.rstrip() for line in kept if line.strip() and not line.startswith(":")]
    return lines


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
