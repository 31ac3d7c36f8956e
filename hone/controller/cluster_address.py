"""Whether a Ray cluster can be there at all: asked before Ray, which would try for minutes.

Leaves out joining it: the Ray controller does.
"""

from __future__ import annotations

import socket

CONNECT_DEADLINE_S = 10.0
_BY_NAME = ("auto", "local")


def check_reachable(address: str | None, key: str) -> None:
    """Raise where an address names a host and port at which nobody listens; `key` is who says so."""
    if not address or address in _BY_NAME:
        return
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"{key}={address}: give host:port, ray://host:port, or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_DEADLINE_S).close()
    except OSError as error:
        raise ConnectionError(
            f"{key}={address}: nobody answers there within {CONNECT_DEADLINE_S:g} s ({error}); start "
            "the cluster with `ray start --head`, or leave the address out to start one here"
        ) from error
