"""Starts processes with posix_spawn, which copies no memory, and sets their rlimits."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Sequence

from hone.sandbox.result import Job

# Python or the warden ignores these signals; ordinary programs expect the default handlers.
ORDINARY_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
StandardFds = tuple[int, int, int]


def spawn(argv: list[str], *, standard: StandardFds, pass_fds: Sequence[int]) -> int:
    """Starts argv with an empty environment and returns its pid. It inherits `pass_fds`.

    The caller must close `pass_fds` at once, because any other child would inherit them too.
    """
    for descriptor in pass_fds:
        os.set_inheritable(descriptor, True)
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(standard)]
    return os.posix_spawn(argv[0], argv, {}, file_actions=actions, setsigdef=ORDINARY_SIGNALS)


def set_rlimits(pid: int, job: Job) -> None:
    """Sets the rlimits of a process that has not started the program; pid 0 is this process.

    In a new user namespace the process limit counts only the processes of the box, including the
    first. Otherwise the kernel counts all processes of this user, also those outside the box.
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
        current = resource.prlimit(pid, kind)[1]
        if current != resource.RLIM_INFINITY:  # a stricter existing limit is kept
            soft, hard = min(soft, current), min(hard, current)
        resource.prlimit(pid, kind, (soft, hard))
