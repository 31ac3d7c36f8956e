"""Sealed memfds: in-memory files that cannot be changed once they are sealed.

The standard input of a box is sealed, because the program in the box must not change it.
"""

from __future__ import annotations

import fcntl
import os

_ADD_SEALS = 1033
_SEAL_WRITE, _SEAL_GROW, _SEAL_SHRINK, _SEAL_SEAL = 0x0008, 0x0004, 0x0002, 0x0001


def create() -> int:
    """Returns the descriptor of an empty file that can be filled and sealed later."""
    return os.memfd_create("hone-text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def write_sealed(text: str) -> int:
    """Returns the descriptor of a sealed file with this text."""
    descriptor = create()
    try:
        # Model output can contain lone surrogates, which strict UTF-8 cannot encode.
        view = memoryview(text.encode(errors="surrogatepass"))
        while view:
            view = view[os.write(descriptor, view) :]
        _seal(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def fill_and_seal(descriptor: int, source: int) -> None:
    """Copies `source` into an empty file and seals it; the offset of `source` does not change."""
    size, position = os.fstat(source).st_size, 0
    while position < size:
        position += os.sendfile(descriptor, source, position, size - position)
    _seal(descriptor)


def read_all(descriptor: int) -> bytes:
    """Returns the whole content of a file, wherever its offset is."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _seal(descriptor: int) -> None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_WRITE | _SEAL_GROW | _SEAL_SHRINK | _SEAL_SEAL)
