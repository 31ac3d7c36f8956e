"""Landlock by ctypes: which files a process may touch, when bubblewrap is not there to hide them.

Denied paths stay visible to stat(2), and UDP is not covered: seccomp denies sockets altogether.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | 1 << 15  # truncate, ioctl on devices
_RIGHTS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP_BIND_CONNECT, _SCOPE_SOCKETS_SIGNALS = 0b11, 0b11


def abi() -> int:
    """The kernel's Landlock version; 0 where it has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_FLAG))


def restrict(*, read: Iterable[str], write: Iterable[str]) -> None:
    """From here on this process reads only `read`, and reads and writes only `write`."""
    version = abi()
    if version == 0:
        raise OSError("landlock: this kernel has none; use bubblewrap")
    handled = _RIGHTS_BY_ABI[max(known for known in _RIGHTS_BY_ABI if known <= version)]
    attributes = struct.pack("Q", handled)
    if version >= 4:
        attributes += struct.pack("Q", _TCP_BIND_CONNECT)
    if version >= 6:
        attributes += struct.pack("Q", _SCOPE_SOCKETS_SIGNALS)
    ruleset = _call(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    try:
        for path in read:
            _allow(ruleset, path, _READ & handled)
        for path in write:
            _allow(ruleset, path, handled)
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(38, 1, 0, 0, 0)  # no new privileges: the kernel asks for it
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # nothing to allow; what is not named stays denied
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        _call(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, target), 0)
    finally:
        os.close(target)


def _call(number: int, *arguments: int | bytes | ctypes.c_size_t) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result = int(libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"landlock: system call {number} failed: {os.strerror(code)}")
    return result
