"""Starts processes with posix_spawn, which copies no memory, and sets their rlimits and user ids.

The warden of root runs as uid 65534, and as root only in `as_root()`. A program that the warden executes
never has root privileges, because exec resets the saved user id.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hone.sandbox.result import Job

# Python or the warden ignores these signals; programs expect the default handlers.
SIGNALS_TO_RESET = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
StandardFds = tuple[int, int, int]  # the descriptors that become stdin, stdout and stderr


def spawn(argv: list[str], *, standard_fds: StandardFds, pass_fds: Sequence[int]) -> int:
    """Starts a process with an empty environment and returns its pid; the process inherits `pass_fds`.

    The process leads a process group, so that a kill of the group reaches a child that it has just started.
    The caller closes `pass_fds` at once, because later children would inherit these descriptors too.
    """
    for descriptor in pass_fds:
        os.set_inheritable(descriptor, True)
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(standard_fds)]
    return os.posix_spawn(
        argv[0], argv, {}, file_actions=actions, setsigdef=SIGNALS_TO_RESET, setpgroup=0
    )


def set_rlimits(pid: int, job: Job) -> None:
    """Sets the rlimits of a process that has not started the program; pid 0 is this process.

    In a new user namespace, the process limit counts only the processes of the box, including its
    first process. Otherwise, the kernel counts all processes of this user.
    """
    cpu_s = job.cpu_limit_s
    limits = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_AS: (job.memory_mb << 20, job.memory_mb << 20),
        resource.RLIMIT_FSIZE: (job.disk_mb << 20, job.disk_mb << 20),
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),  # SIGXCPU, and SIGKILL a second later
        resource.RLIMIT_NOFILE: (job.open_files, job.open_files),
        resource.RLIMIT_NPROC: (job.processes + 1, job.processes + 1),
    }
    for limit, (soft, hard) in limits.items():
        current_hard = resource.prlimit(pid, limit)[1]
        if current_hard != resource.RLIM_INFINITY:  # a hard limit cannot be raised
            soft, hard = min(soft, current_hard), min(hard, current_hard)
        resource.prlimit(pid, limit, (soft, hard))


def lower_privileges(uid: int) -> None:
    """Sets user and group to `uid`, and keeps root as the saved user. Call this once, as root."""
    os.setgroups([])
    os.setresgid(uid, uid, 0)
    os.setresuid(uid, uid, 0)


@contextmanager
def as_root() -> Iterator[None]:
    """Makes root the effective user of the block, if root is the saved user."""
    effective_uid, saved_uid = os.getresuid()[1:]
    if saved_uid != 0 or effective_uid == 0:
        yield
        return
    os.seteuid(0)
    try:
        yield
    finally:
        os.seteuid(effective_uid)


def drop_root() -> None:
    """Removes root as the saved user in a child process that will run untrusted code."""
    effective_uid, saved_uid = os.getresuid()[1:]
    if saved_uid == 0 and effective_uid != 0:
        gid = os.getegid()
        os.setresgid(gid, gid, gid)
        os.setresuid(effective_uid, effective_uid, effective_uid)
