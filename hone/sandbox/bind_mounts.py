"""Bind mounts that make an interpreter in a private home directory readable by uid 65534.

Root's Python is often below /root, which uid 65534 cannot enter. The warden binds the needed paths
to an accessible directory, in a mount namespace that is invisible to the host.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNT_NAMESPACE = 0x00020000
_BIND, _RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEV = 4096, 16384, 1 << 18, 2, 4
_CANDIDATE_DIRECTORIES = ("/mnt", "/media", "/srv", "/opt", "/run")


class BindMounts:
    """The bind mounts of this process; the first one creates the mount namespace."""

    def __init__(self) -> None:
        self._directory: str | None = None
        self._mount_points: dict[str, str] = {}

    def bind(self, paths: Sequence[str]) -> dict[str, str]:
        """Mounts each new path and returns the mount point of every path.

        Raises OSError if this process may not mount.
        """
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
    """Mounts a tmpfs in a new mount namespace and returns the directory that it is mounted on.

    The tmpfs hides what the directory contains, so none of the paths may be in it.
    """
    for directory in _CANDIDATE_DIRECTORIES:
        if os.path.isdir(directory) and not any(p.startswith(directory + "/") for p in paths):
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
    raise OSError(f"the interpreter cannot be mounted: {names} are missing or contain it")


def _mount(
    source: str | None, target: str, filesystem: str | None, flags: int, data: str | None = None
) -> None:
    strings = (source, target, filesystem, data)
    *names, options = [None if text is None else text.encode() for text in strings]
    if _LIBC.mount(*names, ctypes.c_ulong(flags), options) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, f"cannot mount on {target}: {os.strerror(error_number)}")
