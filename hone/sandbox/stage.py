"""Makes an interpreter in a private home directory reachable for an unprivileged bubblewrap.

Root's Python is often below /root, which uid 65534 cannot enter. The warden binds only the needed paths
to an accessible directory, in a mount namespace that is invisible to the host.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_MOUNT_NAMESPACE = 0x00020000
_BIND, _RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEV = 4096, 16384, 1 << 18, 2, 4
_PLACES = ("/mnt", "/media", "/srv", "/opt", "/run")


class Stage:
    """The paths bound so far; the namespace is created with the first one."""

    def __init__(self) -> None:
        self._place: str | None = None
        self._bound: dict[str, str] = {}

    def bind(self, paths: Sequence[str]) -> dict[str, str]:
        """Returns path → where it can be reached. Raises OSError when this process may not mount."""
        for path in paths:
            if path not in self._bound:
                self._place = self._place or _open_place(paths)
                target = os.path.join(self._place, str(len(self._bound)))
                if os.path.isdir(path):
                    os.mkdir(target)
                else:
                    os.close(os.open(target, os.O_CREAT | os.O_CLOEXEC, 0o755))
                _mount(path, target, None, _BIND)
                self._bound[path] = target
        return {path: self._bound[path] for path in paths}


def _open_place(paths: Sequence[str]) -> str:
    for place in _PLACES:
        if os.path.isdir(place) and not any(p.startswith(place + "/") for p in paths):
            if _LIBC.unshare(_NEW_MOUNT_NAMESPACE) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"no mount namespace for the interpreter: {os.strerror(code)}")
            _mount(None, "/", None, _RECURSIVE | _PRIVATE)
            _mount("hone", place, "tmpfs", _NO_SUID | _NO_DEV, "size=64k,mode=0755")
            return place
    raise OSError(f"no directory of {_PLACES} is free to bind the interpreter to")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    if _LIBC.mount(*texts[:3], ctypes.c_ulong(flags), texts[3]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot mount on {target}: {os.strerror(code)}")
