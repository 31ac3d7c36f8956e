"""Starts processes with posix_spawn, which copies no memory, and sets their rlimits."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence

from hone.sandbox.result import Job

# Python or the warden ignores these signals; ordinary programs expect the default handlers.
ORDINARY_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Standard = tuple[int, int, int]


def execute(argv: list[str], *, standard: Standard, keep: Sequence[int]) -> int:
    """Start argv with an empty environment and return its pid. keep: descriptors that it inherits.

    The caller must close them immediately afterwards, because any other child would inherit them too.
    """
    for descriptor in keep:
        os.set_inheritable(descriptor, True)
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(standard)]
    return os.posix_spawn(argv[0], argv, {}, file_actions=actions, setsigdef=ORDINARY_SIGNALS)


def limit(pid: int, job: Job) -> None:
    """Set every rlimit of a process of ours that waits; pid 0 is the calling process.

    In a new user namespace the process limit counts only the processes of the box, including the first.
    Otherwise the kernel counts all processes of this user, including those outside the box.
    """
    cpu_s = job.cpu_limit_s
    limits = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_AS: (job.memory_mb << 20, job.memory_mb << 20),
        resource.RLIMIT_FSIZE: (job.disk_mb << 20, job.disk_mb << 20),
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),  # SIGXCPU first, then SIGKILL
        resource.RLIMIT_NOFILE: (job.open_files, job.open_files),
        resource.RLIMIT_NPROC: (job.processes + 1, job.processes + 1),
    }
    for kind, (soft, hard) in limits.items():
        current_limit = resource.prlimit(pid, kind)[1]
        if current_limit != resource.RLIM_INFINITY:  # a stricter existing limit is kept
            soft, hard = min(soft, current_limit), min(hard, current_limit)
        resource.prlimit(pid, kind, (soft, hard))
