"""From fork to exec: the child joins its group, takes its limits, gives up its rights.

Runs in the warden's child, which has one thread, so Python code between fork and exec is safe.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence

from hone.sandbox.cgroups import Group
from hone.sandbox.plan import Order

SETUP_FAILED = 126
_CLOSE_RANGE, _LAST_DESCRIPTOR, _CLOSE_ON_EXEC = 436, (1 << 31) - 1, 4
_LIBC = ctypes.CDLL(None)


def spawn(
    argv: list[str],
    environment: Mapping[str, str],
    *,
    order: Order,
    group: Group | None,
    standard: tuple[int, int, int],
    keep: Sequence[int],
    last: Callable[[], None] | None = None,
) -> int:
    """Fork and execute argv; the child's pid. What fails before exec is said on its stderr.

    standard: descriptors for stdin, stdout, stderr. keep: further ones the program inherits.
    last: called in the child right before exec, with all limits set and all rights gone.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        if group is not None:
            group.join()
        for target, descriptor in enumerate(standard):
            os.dup2(descriptor, target)
        # Every descriptor is made close-on-exec where it is opened; this is the second lock.
        _LIBC.syscall(_CLOSE_RANGE, 3, _LAST_DESCRIPTOR, _CLOSE_ON_EXEC)
        for descriptor in keep:
            os.set_inheritable(descriptor, True)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these; programs do not
            signal.signal(number, signal.SIG_DFL)
        os.umask(0o022)
        with contextlib.suppress(OSError):
            score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
            os.write(score, b"1000")  # a machine short of memory gives up the box first
        _limit(order)
        _drop(order.plan.drop_to)
        if last is not None:
            last()
        os.execve(argv[0], argv, environment)
    except BaseException as error:  # whatever it was, the child must not go on as a second warden
        os.write(2, f"sandbox: {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(SETUP_FAILED)


def limit_processes(pid: int, count: int, owner: int | None) -> None:
    """RLIMIT_NPROC of a process that waits in its own user namespace, where only it is counted.

    Root in a container often lacks the right to limit another user's process; a process whose
    real ids are that user's has it, so ours are for the length of the call.
    """
    limits = (count, count)
    if owner is None:
        resource.prlimit(pid, resource.RLIMIT_NPROC, limits)
        return
    real_uid, real_gid = os.getuid(), os.getgid()
    os.setresgid(owner, -1, -1)
    os.setresuid(owner, -1, -1)
    try:
        resource.prlimit(pid, resource.RLIMIT_NPROC, limits)
    finally:
        os.setresuid(real_uid, -1, -1)
        os.setresgid(real_gid, -1, -1)


def _limit(order: Order) -> None:
    memory, disk = order.memory_mb << 20, order.disk_mb << 20
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_AS, memory)
    _set(resource.RLIMIT_FSIZE, disk)
    _set(resource.RLIMIT_CPU, order.cpu_s, order.cpu_s + 1)  # SIGXCPU first, then SIGKILL
    _set(resource.RLIMIT_NOFILE, order.open_files)
    if order.plan.bwrap is None:
        # No user namespace: the kernel counts all processes of this user, also those outside.
        _set(resource.RLIMIT_NPROC, order.processes)


def _set(kind: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit; one that is already stricter stays."""
    present = resource.getrlimit(kind)[1]
    hard = soft if hard is None else hard
    if present != resource.RLIM_INFINITY:
        soft, hard = min(soft, present), min(hard, present)
    resource.setrlimit(kind, (soft, hard))


def _drop(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
