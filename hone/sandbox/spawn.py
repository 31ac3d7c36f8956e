"""Starts processes by posix_spawn, which copies no memory, and sets their rlimits."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence

from hone.sandbox.result import Job

# Ignored by Python or by the warden; ordinary programs expect them as they come.
ORDINARY_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Standard = tuple[int, int, int]


def execute(argv: list[str], *, standard: Standard, keep: Sequence[int]) -> int:
    """Start argv without environment and return its pid. keep: descriptors that it inherits.

    The caller closes those of keep at once: until then any child would inherit them.
    """
    for descriptor in keep:
        os.set_inheritable(descriptor, True)
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(standard)]
    return os.posix_spawn(argv[0], argv, {}, file_actions=actions, setsigdef=ORDINARY_SIGNALS)


def limit(pid: int, job: Job) -> None:
    """Set every rlimit of a process that is ours and waits; 0 is the calling one.

    In a user namespace of its own the processes of the box alone are counted, its first included;
    without one, the kernel counts all processes of this user, also those outside.
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
        present = resource.prlimit(pid, kind)[1]
        if present != resource.RLIM_INFINITY:  # one that is already stricter stays
            soft, hard = min(soft, present), min(hard, present)
        resource.prlimit(pid, kind, (soft, hard))
