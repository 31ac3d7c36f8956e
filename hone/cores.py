"""The number of CPU cores that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Returns the number of cores in this process's CPU affinity, or of all cores on other systems."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
