"""Sealed memfds: in-memory files that cannot be changed once they are sealed.

The program in the box reads its standard input from one and must not be able to write to it.
"""

from __future__ import annotations

import fcntl
import os

_ADD_SEALS = 1033
_WRITE, _GROW, _SHRINK, _SEAL = 0x0008, 0x0004, 0x0002, 0x0001


def create() -> int:
    """Returns an empty file that can be filled and sealed later."""
    return os.memfd_create("hone-text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def write_sealed(text: str) -> int:
    """Returns a sealed file with this text."""
    descriptor = create()
    try:
        # Model output can contain lone surrogates; Python source cannot, standard input can.
        view = memoryview(text.encode(errors="surrogatepass"))
        while view:
            view = view[os.write(descriptor, view) :]
        _seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def fill_and_seal(descriptor: int, source: int) -> None:
    """Copies source into an empty file and seals it; the offset of source does not change."""
    size, copied = os.fstat(source).st_size, 0
    while copied < size:
        copied += os.sendfile(descriptor, source, copied, size - copied)
    _seal(descriptor)


def read_all(descriptor: int) -> bytes:
    """Returns the whole content, regardless of the offset."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _seal(descriptor: int) -> None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, _ADD_SEALS, _WRITE | _GROW | _SHRINK | _SEAL)
