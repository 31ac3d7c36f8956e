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
_DIRECTORIES = ("/mnt", "/media", "/srv", "/opt", "/run")


class BindMounts:
    """The mounts made so far; the first one creates the mount namespace."""

    def __init__(self) -> None:
        self._directory: str | None = None
        self._targets: dict[str, str] = {}

    def bind(self, paths: Sequence[str]) -> dict[str, str]:
        """Returns path → its mount point. Raises OSError if this process may not mount."""
        for path in paths:
            if path not in self._targets:
                self._directory = self._directory or _mount_directory(paths)
                target = os.path.join(self._directory, str(len(self._targets)))
                if os.path.isdir(path):
                    os.mkdir(target)
                else:
                    os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o755))
                _mount(path, target, None, _BIND)
                self._targets[path] = target
        return {path: self._targets[path] for path in paths}


def _mount_directory(paths: Sequence[str]) -> str:
    """Mounts a tmpfs in a new mount namespace, on a directory that contains no path; returns it."""
    for directory in _DIRECTORIES:
        if os.path.isdir(directory) and not any(p.startswith(directory + "/") for p in paths):
            if _LIBC.unshare(_NEW_MOUNT_NAMESPACE) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"no mount namespace for the interpreter: {os.strerror(code)}")
            _mount(None, "/", None, _RECURSIVE | _PRIVATE)
            _mount("hone", directory, "tmpfs", _NO_SUID | _NO_DEV, "size=64k,mode=0755")
            return directory
    raise OSError(f"no directory of {_DIRECTORIES} is free to bind the interpreter to")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    if _LIBC.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot mount on {target}: {os.strerror(code)}")
