"""The file descriptors of one box, and sealed memfds: files in memory that no program can change."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors

_ADD_SEALS = 1033
_SEAL_WRITE, _SEAL_GROW, _SEAL_SHRINK, _SEAL_SEAL = 0x0008, 0x0004, 0x0002, 0x0001


class DescriptorOwner:
    """Owns the open descriptors of one run."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._fds: set[int] = set()

    def _track(self, descriptor: int) -> int:
        self._fds.add(descriptor)
        return descriptor

    def _pipe(self) -> tuple[int, int]:
        """Returns the read end and the write end of a new pipe."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        return self._track(read_fd), self._track(write_fd)

    def _memfd(self, data: bytes) -> int:
        descriptor = self._track(os.memfd_create("hone", os.MFD_CLOEXEC))
        os.write(descriptor, data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def _close(self, descriptor: int) -> None:
        if descriptor in self._fds:
            self._fds.remove(descriptor)
            os.close(descriptor)

    def _unwatch_and_close(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)
        self._close(descriptor)


def create_memfd() -> int:
    """Returns the descriptor of an empty file for `fill_and_seal`."""
    return os.memfd_create("hone-text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def write_sealed(text: str) -> int:
    """Returns the descriptor of a sealed file with the text."""
    descriptor = create_memfd()
    try:
        # Text of a model can contain lone surrogates, which strict UTF-8 cannot encode.
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
    """Returns the whole content of a file, independent of its offset."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _seal(descriptor: int) -> None:
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_WRITE | _SEAL_GROW | _SEAL_SHRINK | _SEAL_SEAL)
