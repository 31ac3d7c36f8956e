"""Waiting for an answer on behalf of a caller who may hang up meanwhile."""

from __future__ import annotations

import select
import socket

from hone.sandbox.result import SandboxError

_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class HungUp(SandboxError):
    """The caller for whom the run was made has gone: nobody wants its result."""


def wait_for(connection: socket.socket, timeout_s: float, caller: socket.socket | None) -> None:
    """Return when there is something to read. HungUp when the caller goes first, else TimeoutError."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if caller is not None:
        poll.register(caller, _GONE)
    ready = [descriptor for descriptor, _ in poll.poll(1000 * timeout_s)]
    if connection.fileno() in ready:
        return
    if ready:
        raise HungUp("sandbox: the caller hung up; the run was ended")
    raise TimeoutError


def has_gone(caller: socket.socket) -> bool:
    poll = select.poll()
    poll.register(caller, _GONE)
    return bool(poll.poll(0))
