"""Starts a raylet on a busy machine: time for its agents, and ports that no other program is given.

Otherwise a raylet ends when its agents have not started or chosen their ports within 15 s. `hone launch`
loads this file alone: it uses the standard library, and Ray where it runs.
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
SLOW_START = {
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
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
RESERVED_FOR_S = 300.0
_ABOVE_RAY = range(20_000, 65_536)
"""`ray start` gives its workers the ports 10002 to 19999."""
_reserved: deque[tuple[float, socket.socket]] = deque()
_lock = threading.Lock()


def allow_slow_start() -> None:
    """Sets Ray's deadlines for the parts of a node, for the raylets that this process starts."""
    for name, value in SLOW_START.items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def chosen_agent_ports() -> Iterator[None]:
    """Gives the agents of every raylet that is started inside the block a port each."""
    from ray._private import services
    from ray._raylet import (  # type: ignore[attr-defined]
        DASHBOARD_AGENT_LISTEN_PORT_NAME,
        persist_port,
    )

    start_raylet = services.start_raylet

    def start(*arguments: Any, **options: Any) -> Any:
        call = inspect.signature(start_raylet).bind(*arguments, **options)
        ports = dict(zip(AGENT_PORTS, free_ports(len(AGENT_PORTS)), strict=True))
        call.arguments.update(ports)
        # The raylet waits for this file even if it knows the port.
        where = call.arguments["session_dir"], call.arguments["node_id"]
        persist_port(*where, DASHBOARD_AGENT_LISTEN_PORT_NAME, ports[AGENT_PORTS[0]])
        return start_raylet(*call.args, **call.kwargs)

    services.start_raylet = start
    try:
        yield
    finally:
        services.start_raylet = start_raylet


def free_ports(count: int) -> list[int]:
    """Returns different ports that are free on every interface now.

    No outgoing connection gets one by chance, and for RESERVED_FOR_S no other call on this machine returns
    one of them while this process lives: its server may start late.
    """
    candidates, ports = _candidates(), list[int]()
    with _lock:
        now = time.monotonic()
        while _reserved and _reserved[0][0] < now:
            _reserved.popleft()[1].close()
        # Runs with the same seed must not try the same ports.
        for port in random.SystemRandom().sample(candidates, min(len(candidates), 50 * count)):
            if len(ports) == count:
                break
            # A UDP port of the same number marks it as taken; servers here listen on TCP.
            mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                mark.bind(("127.0.0.1", port))
                socket.create_server(("", port)).close()
            except OSError:
                mark.close()
                continue
            _reserved.append((now + RESERVED_FOR_S, mark))
            ports.append(port)
    if len(ports) < count:
        raise OSError(f"this machine has no {count} free ports among {len(candidates)}")
    return ports


def _candidates() -> list[int]:
    """Returns the ports above Ray's that the kernel gives to no outgoing connection, or all if it has few."""
    try:
        first, last = (int(word) for word in EPHEMERAL_RANGE.read_text("ascii").split())
    except (OSError, ValueError):  # no Linux
        first, last = 32_768, 65_535
    ports = [port for port in _ABOVE_RAY if not first <= port <= last]
    return ports if len(ports) >= 200 else list(_ABOVE_RAY)
