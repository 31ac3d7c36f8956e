"""All uses of Ray's private modules: where Ray listens, its token, and the ports of its agents.

A raylet ends if its agents have not started and chosen their ports within 15 s, and no setting changes
that; on a busy machine they take longer, so they get their ports before they start.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

from ray._private import ray_constants, services
from ray._private import worker as ray_worker
from ray._private.state import available_resources_per_node as available_resources_per_node
from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    AuthenticationTokenLoader,
    Config,
    persist_port,
)

from hone.launch.free_ports import free_ports
from hone.types import Fields

LOOPBACK = "127.0.0.1"
AGENT_PORTS = (
    "dashboard_agent_listen_port",
    "metrics_agent_port",
    "runtime_env_agent_port",
    "metrics_export_port",
)


def reload_settings() -> None:
    """Makes Ray read the environment again, which it caches at import and for each cluster."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """A cluster that starts inside the block listens on loopback, as with LOOPBACK_ENV=0.

    Ray read that variable when it was imported, so Ray's constant is set as well.
    """
    previous_constant = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = previous_constant


@contextlib.contextmanager
def fixed_agent_ports() -> Iterator[None]:
    """Assigns a free port to each agent of every raylet that starts inside the block."""
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


def start_node(options: list[str], only_loopback: bool) -> str:
    """Runs `ray start` in this process, whose children Ray's processes become; returns their address."""
    from ray.scripts import scripts

    if only_loopback:
        ray_constants.ENABLE_RAY_CLUSTER = True  # otherwise `ray start` refuses a second node
        services.get_node_ip_address = lambda address=None: LOOPBACK
    # Ray Client is not used, and two clusters on one machine would use the same port for it.
    scripts.get_ray_client_dependency_error = lambda: ImportError("not used")
    with fixed_agent_ports():
        scripts.start.main(options, standalone_mode=False)
    return str(services.get_node_ip_address())


def log_raylet_messages(logger: logging.Logger) -> None:
    """Makes Ray log the messages of raylets instead of printing them; hone's errors report failures."""
    print_to_stdstream = ray_worker.print_to_stdstream

    def print_or_log(data: Fields, ignore_prefix: bool) -> None:
        if data.get("pid") == "raylet":
            logger.info("Ray: %s", "\n".join(data["lines"]))
        else:
            print_to_stdstream(data, ignore_prefix)

    if print_to_stdstream.__module__ == ray_worker.__name__:  # not replaced yet
        ray_worker.print_to_stdstream = print_or_log
