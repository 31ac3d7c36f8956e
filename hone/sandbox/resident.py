"""The memory of a run without a memory cgroup: added up over its processes, from outside.

Between two looks a run can overshoot; a cgroup cannot be overshot, and is used where there is one.
"""

from __future__ import annotations

import contextlib
import os


def resident_bytes(root: int) -> int:
    """Private memory of a process and all it started."""
    pages, queue = 0, [root]
    while queue:
        pid = queue.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{pid}/statm") as statm:
                _, resident, shared, *_ = map(int, statm.read().split())
            pages += resident - shared
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as children:
                    queue.extend(map(int, children.read().split()))
    return pages * os.sysconf("SC_PAGE_SIZE")
