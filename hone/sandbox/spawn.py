"""From the warden to a new process: by posix_spawn, which copies no memory, or by fork where the child
must build its own walls. Limits are set on the waiting box from outside, or by the child itself.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence

from hone.sandbox.cgroups import Group
from hone.sandbox.plan import Order
from hone.sandbox.rights import drop, raised

_SETUP_FAILED = 126  # for the process list alone: the report says what failed
# Ignored by Python or by the warden; ordinary programs expect them as they come.
_ORDINARY = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLOSE_RANGE, _LAST_DESCRIPTOR, _CLOSE_ON_EXEC = 436, (1 << 31) - 1, 4
_SET_PARENT_DEATH_SIGNAL = 1
_LIBC = ctypes.CDLL(None)
Standard = tuple[int, int, int]


def execute(argv: list[str], *, standard: Standard, keep: Sequence[int]) -> int:
    """Start argv with no environment; its pid. keep: descriptors it inherits beside standard ones.

    The caller closes those of keep at once: until then any child would inherit them.
    """
    for descriptor in keep:
        os.set_inheritable(descriptor, True)
    actions = [(os.POSIX_SPAWN_DUP2, fd, target) for target, fd in enumerate(standard)]
    return os.posix_spawn(argv[0], argv, {}, file_actions=actions, setsigdef=_ORDINARY)


def fork(
    argv: list[str],
    environment: Mapping[str, str],
    *,
    order: Order,
    group: Group | None,
    standard: Standard,
    last: Callable[[], None],
    report: int,
) -> int:
    """Fork, limit, and execute argv; the child's pid.

    last: called in the child right before exec, with all limits set and all rights gone.
    report: gets a sentence when something fails before exec, and is closed by exec.
    """
    pid = os.fork()
    if pid:
        return pid
    try:
        if group is not None:
            with raised():
                group.admit(os.getpid())
        for target, descriptor in enumerate(standard):
            os.dup2(descriptor, target)
        # Every descriptor is made close-on-exec where it is opened; this is the second lock.
        _LIBC.syscall(_CLOSE_RANGE, 3, _LAST_DESCRIPTOR, _CLOSE_ON_EXEC)
        for number in _ORDINARY:
            signal.signal(number, signal.SIG_DFL)
        limit(0, order)
        drop()
        _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        last()
        os.execve(argv[0], argv, environment)
    except BaseException as error:  # whatever it was, the child must not go on as a second warden
        os.write(report, f"sandbox: {type(error).__name__}: {error}".encode())
    finally:
        os._exit(_SETUP_FAILED)


def limit(pid: int, order: Order) -> None:
    """Set every rlimit of a process that is ours and waits; 0 is the calling one.

    In a user namespace of its own the processes of the box alone are counted, its first included;
    without one, the kernel counts all processes of this user, also those outside.
    """
    memory, disk = order.memory_mb << 20, order.disk_mb << 20
    _set(pid, resource.RLIMIT_CORE, 0)
    _set(pid, resource.RLIMIT_AS, memory)
    _set(pid, resource.RLIMIT_FSIZE, disk)
    _set(pid, resource.RLIMIT_CPU, order.cpu_s, order.cpu_s + 1)  # SIGXCPU first, then SIGKILL
    _set(pid, resource.RLIMIT_NOFILE, order.open_files)
    _set(pid, resource.RLIMIT_NPROC, order.processes + 1)


def _set(pid: int, kind: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit; one that is already stricter stays."""
    present = resource.prlimit(pid, kind)[1]
    hard = soft if hard is None else hard
    if present != resource.RLIM_INFINITY:
        soft, hard = min(soft, present), min(hard, present)
    resource.prlimit(pid, kind, (soft, hard))
