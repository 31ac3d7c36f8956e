"""Chooses the ports of a raylet's agents before they start.

Otherwise a raylet ends when its agents have not chosen them within 15 s, as on a busy machine or a slow disk.
"""

from __future__ import annotations

import contextlib
import inspect
import socket
from collections.abc import Iterator
from typing import Any

AGENT_PORTS = (
    "dashboard_agent_listen_port",
    "metrics_agent_port",
    "runtime_env_agent_port",
    "metrics_export_port",
)


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
    """Returns different ports that are free on every interface now."""
    with contextlib.ExitStack() as held:
        servers = [held.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]
