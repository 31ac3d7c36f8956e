"""Settings with which a raylet starts on a busy machine: longer deadlines and fixed agent ports.

By default a raylet ends if its agents have not started and chosen their ports within 15 s. `hone
launch` loads this file by its path, so it imports the standard library only.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

START_DEADLINE_S = 240
SLOW_START_ENV = {
    "RAY_raylet_start_wait_time_s": str(START_DEADLINE_S),
    "RAY_agent_register_timeout_ms": str(1000 * START_DEADLINE_S),
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": str(START_DEADLINE_S),
}
AGENT_PORTS = (
    "dashboard_agent_listen_port",
    "metrics_agent_port",
    "runtime_env_agent_port",
    "metrics_export_port",
)
EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
RESERVATION_S = 300.0
_PORTS_ABOVE_RAY = range(20_000, 65_536)
"""Ray's workers use the ports 10002 to 19999."""
_reservations: deque[tuple[float, socket.socket]] = deque()
"""The end time of each reservation, and the socket that holds it."""
_lock = threading.Lock()


def allow_slow_start() -> None:
    """Lengthens Ray's start deadlines for the raylets that this process starts."""
    for name, value in SLOW_START_ENV.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def fixed_agent_ports() -> Iterator[None]:
    """Assigns a free port to each agent of every raylet that starts inside the block."""
    from ray._private import services
    from ray._raylet import (  # type: ignore[attr-defined]
        DASHBOARD_AGENT_LISTEN_PORT_NAME,
        persist_port,
    )

    start_raylet = services.start_raylet

    def start_with_ports(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(start_raylet).bind(*args, **kwargs)
        ports = dict(zip(AGENT_PORTS, free_ports(len(AGENT_PORTS)), strict=True))
        call.arguments.update(ports)
        # The raylet waits for the file that persist_port writes, even if it knows the port.
        folder, node_id = call.arguments["session_dir"], call.arguments["node_id"]
        persist_port(folder, node_id, DASHBOARD_AGENT_LISTEN_PORT_NAME, ports[AGENT_PORTS[0]])
        return start_raylet(*call.args, **call.kwargs)

    services.start_raylet = start_with_ports
    try:
        yield
    finally:
        services.start_raylet = start_raylet


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
