"""The box without bubblewrap: a temporary directory, Landlock for files, seccomp for sockets.

The program sees the pids of host processes, and stat(2) works on denied paths. This box therefore does not
give the guarantee `processes` (layers.py), and is used only if the run's `minimum` does not demand it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from collections.abc import Iterable

from hone.sandbox import seccomp
from hone.sandbox.cgroups import Cgroup
from hone.sandbox.interpreter import SYSTEM_PATHS
from hone.sandbox.plan import DEVICES, RunRequest, box_environment
from hone.sandbox.processes import SIGNALS_TO_RESET, StandardFds, as_root, drop_root, set_rlimits

log = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None, use_errno=True)
_SETUP_FAILED_EXIT_CODE = 126  # the reason is in the error pipe
# Numbers of system calls, and the flags and access rights that are their arguments.
_CLOSE_RANGE, _MAX_DESCRIPTOR, _CLOSE_ON_EXEC = 436, (1 << 31) - 1, 4
_SET_PARENT_DEATH_SIGNAL, _NO_NEW_PRIVILEGES = 1, 38
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ_RIGHTS = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15  # truncate, ioctl on devices
_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP_BIND_CONNECT, _SCOPE_SOCKETS_SIGNALS = 0b11, 0b11


def make_home(request: RunRequest, file_fds: list[int]) -> str:
    """Creates the working directory of a run with its files, and returns the path."""
    home = tempfile.mkdtemp(prefix=f"hone-box-{os.getpid()}-")
    for name, descriptor in zip(request.file_names, file_fds, strict=True):
        path = os.path.join(home, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as target, os.fdopen(os.dup(descriptor), "rb") as source:
            shutil.copyfileobj(source, target)
    return home


def remove_home(home: str) -> None:
    """Removes the directory with chmod and rm, which have no recursion limit and do not follow links."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf", "--one-file-system"]):
        environment = {"PATH": "/usr/bin:/bin"}
        subprocess.run([*command, "--", home], stderr=subprocess.DEVNULL, env=environment)
    if os.path.lexists(home):
        log.warning("sandbox: %s could not be removed; remove it by hand", home)


def fork_program(
    request: RunRequest,
    home: str,
    cgroup: Cgroup | None,
    standard_fds: StandardFds,
    error_pipe: int,
) -> int:
    """Forks a child that restricts itself and executes the program; returns the pid of the child.

    The child writes an error of its setup to `error_pipe`; exec closes the pipe.
    """
    warden_pid = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        if cgroup is not None:
            with as_root():
                cgroup.add_process(os.getpid())
        for target, descriptor in enumerate(standard_fds):
            os.dup2(descriptor, target)
        # The warden opens all descriptors close-on-exec; this call is a second safeguard.
        _LIBC.syscall(_CLOSE_RANGE, 3, _MAX_DESCRIPTOR, _CLOSE_ON_EXEC)
        for number in SIGNALS_TO_RESET:
            signal.signal(number, signal.SIG_DFL)
        set_rlimits(0, request.job)
        drop_root()
        _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != warden_pid:
            raise OSError("the warden has ended")
        os.setsid()
        os.chdir(home)
        interpreter = request.plan.interpreter
        restrict(read_paths=(*SYSTEM_PATHS, *interpreter.read_paths), write_paths=(home, *DEVICES))
        if request.plan.use_seccomp:
            seccomp.install(seccomp.build_filter(deny_setsid_and_setpgid=True))
        argv = [interpreter.executable, f"{home}/main.py", *request.job.argv]
        os.execve(argv[0], argv, box_environment(home))
    except BaseException as error:  # otherwise the child would continue as a second warden
        os.write(error_pipe, f"sandbox: {type(error).__name__}: {error}".encode())
    finally:
        os._exit(_SETUP_FAILED_EXIT_CODE)


def abi_version() -> int:
    """Returns the version of the kernel's Landlock ABI, or 0 without Landlock."""
    return max(0, _LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG))


def restrict(*, read_paths: Iterable[str], write_paths: Iterable[str]) -> None:
    """Lets this process read only `read_paths` and `write_paths`, and write only `write_paths`."""
    version = abi_version()
    if version == 0:
        raise OSError("this kernel does not support Landlock; use bubblewrap")
    handled_rights = _RIGHTS_BY_ABI[max(abi for abi in _RIGHTS_BY_ABI if abi <= version)]
    attributes = struct.pack("Q", handled_rights)
    if version >= 4:
        attributes += struct.pack("Q", _TCP_BIND_CONNECT)
    if version >= 6:
        attributes += struct.pack("Q", _SCOPE_SOCKETS_SIGNALS)
    ruleset = _syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for path in read_paths:
            _allow(ruleset, path, _READ_RIGHTS & handled_rights)
        for path in write_paths:
            _allow(ruleset, path, handled_rights)
        _LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)  # required by the kernel
        _syscall(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        path_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # without a rule, access is denied
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, path_fd), 0)
    finally:
        os.close(path_fd)


def _syscall(number: int, *arguments: int | bytes | ctypes.c_size_t) -> int:
    result = int(_LIBC.syscall(number, *arguments))
    if result < 0:
        error_number = ctypes.get_errno()
        raise OSError(
            error_number, f"landlock: system call {number} failed: {os.strerror(error_number)}"
        )
    return result
