"""Chooses the Python interpreter of the box, and finds the paths that the interpreter needs.

The box hides site-packages, unless the interpreter belongs to a virtual environment. The interpreter of root
is often below /root, which uid 65534 cannot enter; the warden bind-mounts such an interpreter elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hone.sandbox.result import SandboxUnavailable

SYSTEM_PYTHON = "/usr/bin/python3"
SYSTEM_PATHS = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin")
_SYSTEM_PREFIXES = tuple(f"{path}/" for path in SYSTEM_PATHS)
_PRINT_PATHS_AND_VERSION = (
    "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix,"
    " getattr(sys, '_base_executable', sys.executable), '%d.%d' % sys.version_info[:2]]))"
)
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNT_NAMESPACE = 0x00020000
_BIND, _RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEV = 4096, 16384, 1 << 18, 2, 4  # flags of mount(2)
_CANDIDATE_DIRECTORIES = ("/mnt", "/media", "/srv", "/opt", "/run")


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter and the paths that it needs to start."""

    executable: str
    read_paths: tuple[str, ...]
    """Required paths outside the system directories, which the box mounts read-only."""
    masked_paths: tuple[str, ...]
    """Directories below `read_paths` that the box hides."""

    def is_readable_by(self, uid: int, gid: int) -> bool:
        """Returns whether the user `uid` of the group `gid` can open all paths."""
        for path in map(Path, (self.executable, *self.read_paths)):
            for part in (path, *path.parents):
                status = part.stat()  # the mode has three bits each for user, group and others
                group_or_other_shift = 3 if status.st_gid == gid else 0
                shift = 6 if status.st_uid == uid else group_or_other_shift
                # Bit 1 lets a user enter a directory or execute a file, bit 4 read a file.
                required_bits = 0o1 if stat.S_ISDIR(status.st_mode) else 0o5
                if (status.st_mode >> shift) & required_bits != required_bits:
                    return False
        return True


def _link_target_directories(path: str) -> list[str]:
    """Returns the directories of all links and of the file that the link `path` leads to."""
    directories = [os.path.dirname(os.path.realpath(path))]
    while os.path.islink(path):
        path = os.path.join(os.path.dirname(path), os.readlink(path))
        directories.append(os.path.dirname(os.path.normpath(path)))
    return directories


@functools.lru_cache(maxsize=8)
def describe(executable: str | None = None) -> Interpreter:
    """Returns the interpreter at `executable`, or by default the base interpreter of this process."""
    if executable is None:
        base = getattr(sys, "_base_executable", None) or sys.executable
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        paths_and_version = [base, sys.base_prefix, sys.base_prefix, base, version]
    else:
        try:
            command = [executable, "-I", "-c", _PRINT_PATHS_AND_VERSION]
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=30, check=True
            )
            paths_and_version = json.loads(process.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise SandboxUnavailable(
                f"sandbox: interpreter={executable!r} does not run ({error}); set a Python ≥ 3.8"
            ) from error
    path, prefix, base_prefix, base_executable, version = paths_and_version
    real_path = os.path.realpath(base_executable)
    is_in_venv = prefix != base_prefix
    required_paths = _link_target_directories(path) if is_in_venv else [real_path]
    required_paths += [os.path.join(base_prefix, name) for name in ("lib", "lib64")]
    if is_in_venv:
        required_paths.append(prefix)
    read_paths = [
        required_path
        for required_path in dict.fromkeys(required_paths)
        if not f"{required_path}/".startswith(_SYSTEM_PREFIXES) and os.path.exists(required_path)
    ]
    library = f"{base_prefix}/lib/python{version}"
    package_directories = (
        f"{library}/site-packages",
        f"{library}/dist-packages",
        f"{base_prefix}/lib/python3/dist-packages",
        f"{base_prefix}/local/lib/python{version}/dist-packages",
    )
    masked_paths = () if is_in_venv else tuple(filter(os.path.isdir, package_directories))
    return Interpreter(path if is_in_venv else real_path, tuple(read_paths), masked_paths)


def choose(executable: str | None, *, uid: int, gid: int, bind_interpreter: bool) -> Interpreter:
    """Returns the interpreter at `executable`, or by default the interpreter of this process.

    The system's Python replaces a default that `uid` cannot read. With `bind_interpreter`, the warden makes
    every interpreter readable. Raises SandboxUnavailable if `uid` cannot read the interpreter.
    """
    interpreter = describe(executable)
    if bind_interpreter or interpreter.is_readable_by(uid, gid):
        return interpreter
    if executable is None and os.path.exists(SYSTEM_PYTHON):
        return describe(SYSTEM_PYTHON)
    raise SandboxUnavailable(
        f"sandbox: uid {uid} cannot read the interpreter {interpreter.executable}, and this process"
        f" may not mount it elsewhere; choose one that it can read, such as {SYSTEM_PYTHON}"
    )


class BindMounts:
    """The bind mounts of this process, in a mount namespace that the first mount creates."""

    def __init__(self) -> None:
        self._directory: str | None = None
        self._mount_points: dict[str, str] = {}

    def bind(self, paths: Sequence[str]) -> dict[str, str]:
        """Mounts each new path and returns the mount point of every path."""
        for path in paths:
            if path not in self._mount_points:
                self._directory = self._directory or _mount_directory(paths)
                mount_point = os.path.join(self._directory, str(len(self._mount_points)))
                if os.path.isdir(path):
                    os.mkdir(mount_point)
                else:
                    os.close(os.open(mount_point, os.O_CREAT | os.O_CLOEXEC, 0o755))
                _mount(path, mount_point, None, _BIND)
                self._mount_points[path] = mount_point
        return {path: self._mount_points[path] for path in paths}


def _mount_directory(paths: Sequence[str]) -> str:
    """Mounts a tmpfs in a new mount namespace and returns the mount point.

    The tmpfs hides the content of the directory, so the directory must contain none of the paths.
    """
    for directory in _CANDIDATE_DIRECTORIES:
        if os.path.isdir(directory) and not any(path.startswith(directory + "/") for path in paths):
            if _LIBC.unshare(_NEW_MOUNT_NAMESPACE) != 0:
                error_number = ctypes.get_errno()
                raise OSError(
                    error_number,
                    f"no mount namespace for the interpreter: {os.strerror(error_number)}",
                )
            _mount(None, "/", None, _RECURSIVE | _PRIVATE)
            _mount("hone", directory, "tmpfs", _NO_SUID | _NO_DEV, "size=64k,mode=0755")
            return directory
    names = ", ".join(_CANDIDATE_DIRECTORIES)
    raise OSError(
        f"the interpreter cannot be mounted: {names} are missing or contain the interpreter"
    )


def _mount(
    source: str | None, target: str, filesystem: str | None, flags: int, data: str | None = None
) -> None:
    strings = (source, target, filesystem, data)
    *names, options = [None if text is None else text.encode() for text in strings]
    if _LIBC.mount(*names, ctypes.c_ulong(flags), options) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"cannot mount on {target}: {os.strerror(error_number)}")
