"""The file descriptors of one box, which are close-on-exec and are closed with the box."""

from __future__ import annotations

import contextlib
import os
import selectors
from abc import ABC, abstractmethod
from collections.abc import Callable


class DescriptorOwner(ABC):
    """Owns the open descriptors of one run and their callbacks in the warden's event loop."""

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

    def guard(self, action: Callable[[], None]) -> None:
        """Calls the action; an exception ends this run, but not the warden or other runs."""
        try:
            action()
        except Exception as error:
            self._fail(error)

    @abstractmethod
    def _fail(self, error: Exception) -> None:
        """Ends this run with an error."""

    def _close(self, descriptor: int) -> None:
        if descriptor in self._fds:
            self._fds.remove(descriptor)
            os.close(descriptor)

    def _unwatch_and_close(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)
        self._close(descriptor)
