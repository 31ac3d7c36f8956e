"""Reads from a socket with one deadline for everything that is read, however slowly it arrives."""

from __future__ import annotations

import io
import select
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

DISCONNECT_EVENTS = (
    getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
)  # RDHUP: Linux
"""The events of a socket whose other end has closed the connection."""


class Deadline:
    """A point in time; every wait gets the seconds that remain until then."""

    def __init__(self, timeout_s: float) -> None:
        self.restart(timeout_s)

    def restart(self, timeout_s: float) -> None:
        self._timeout_s, self._end_s = timeout_s, time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Returns the seconds that remain; raises TimeoutError if there are none."""
        remaining_s = self._end_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError(f"timed out after {self._timeout_s:g} s")
        return remaining_s


class TooManyBytes(OSError):
    """The other end sent more than the limit."""


class DeadlineReader(io.RawIOBase):
    """What a socket receives until the deadline, at most `max_bytes`; TLS sockets included."""

    def __init__(
        self, connection: socket.socket, deadline: Deadline, max_bytes: int | None = None
    ) -> None:
        self._connection, self._deadline, self._max_bytes = connection, deadline, max_bytes
        self._num_bytes = 0
        self._raw = connection.makefile("rb", buffering=0)  # keeps the connection open

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int | None:
        self._connection.settimeout(self._deadline.remaining_s())
        count = self._raw.readinto(buffer)
        self._num_bytes += count or 0
        if self._max_bytes is not None and self._num_bytes > self._max_bytes:
            raise TooManyBytes(f"more than {self._max_bytes:,} bytes")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
