"""How many processes or threads may compute at once."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores this process may use (all of the machine's where the system does not say)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
