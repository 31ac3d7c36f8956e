"""Ports of this machine that are free, and that no other process of ours takes meanwhile."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import deque
from pathlib import Path

EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
RESERVATION_S = 300.0
_PORTS_ABOVE_RAY = range(20_000, 65_536)
"""Ray's workers use the ports 10002 to 19999."""
_reservations: deque[tuple[float, socket.socket]] = deque()
"""The end time of each reservation, and the socket that holds it."""
_lock = threading.Lock()


def free_ports(count: int) -> list[int]:
    """Returns distinct ports that are free on every interface, outside the ephemeral range.

    No other call on this machine returns these ports for RESERVATION_S.
    """
    candidates = _candidate_ports()
    ports: list[int] = []
    with _lock:
        now = time.monotonic()
        while _reservations and _reservations[0][0] < now:
            _reservations.popleft()[1].close()
        # Runs with the same seed must not try the same ports.
        for port in random.SystemRandom().sample(candidates, min(len(candidates), 50 * count)):
            if len(ports) == count:
                break
            # A UDP socket on the same number reserves the port; our servers listen on TCP.
            reservation = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                reservation.bind(("127.0.0.1", port))
                socket.create_server(("", port)).close()
            except OSError:
                reservation.close()
                continue
            _reservations.append((now + RESERVATION_S, reservation))
            ports.append(port)
    if len(ports) < count:
        raise OSError(f"this machine has fewer than {count} free ports among {len(candidates)}")
    return ports


def _candidate_ports() -> list[int]:
    """Returns the ports above Ray's outside the ephemeral range; if these are few, all ports above Ray's."""
    try:
        first, last = (int(word) for word in EPHEMERAL_RANGE_FILE.read_text("ascii").split())
    except (OSError, ValueError):  # not Linux
        first, last = 32_768, 65_535
    ports = [port for port in _PORTS_ABOVE_RAY if not first <= port <= last]
    return ports if len(ports) >= 200 else list(_PORTS_ABOVE_RAY)
