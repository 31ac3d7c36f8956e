"""Routes requests to servers by trajectory, prefix and load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hone.rollout.http_server import HttpServer
from hone.rollout.requests import Request

_PREFIX_TOKENS = 256
"""Requests whose first tokens are equal, up to this number, go to the same server."""
_MAX_IMBALANCE = 8
"""A known prefix goes to the least loaded server if its own has over this many streams more."""
_MAX_ROUTES = 8192
"""Maximum number of recent trajectories and prefixes whose server is remembered."""


class Router:
    """Routes recent trajectories and prefixes to the server whose KV cache has them."""

    def __init__(self, servers: Sequence[HttpServer]) -> None:
        self._servers = list(servers)
        self._server_by_route: OrderedDict[object, HttpServer] = OrderedDict()

    def route(self, request: Request) -> HttpServer:
        """Returns the server for a request.

        A known trajectory returns to its server, and so does a known prefix unless the server is
        overloaded. Other requests go to the least loaded server.
        """
        healthy_servers = [server for server in self._servers if server.healthy] or self._servers
        least_loaded = min(healthy_servers, key=lambda server: server.num_streams)
        trajectory, prefix = request.request_id, tuple(request.prompt_ids[:_PREFIX_TOKENS])
        server = self._server_by_route.get(trajectory)
        if server not in healthy_servers:
            server = self._server_by_route.get(prefix)
            if (
                server not in healthy_servers
                or server.num_streams > least_loaded.num_streams + _MAX_IMBALANCE
            ):
                server = least_loaded
        for route in (trajectory, prefix):
            self._server_by_route[route] = server
            self._server_by_route.move_to_end(route)
        while len(self._server_by_route) > _MAX_ROUTES:
            self._server_by_route.popitem(last=False)
        return server
