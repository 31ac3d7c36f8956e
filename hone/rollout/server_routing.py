"""Routes requests to servers by trajectory, prefix and load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hone.rollout.http_server import HttpServer
from hone.rollout.requests import Request

_PREFIX_TOKENS = 256
"""Requests with the same first tokens go to the same server."""
_MAX_IMBALANCE = 8
"""Requests that a server may have above the least loaded one before its prefixes go elsewhere."""
_MAX_ROUTES = 8192


class Router:
    """Routes recent trajectories and prefixes to the server whose KV cache has them."""

    def __init__(self, servers: Sequence[HttpServer]) -> None:
        self._servers = list(servers)
        self._server_of: OrderedDict[object, HttpServer] = OrderedDict()

    def route(self, request: Request) -> HttpServer:
        """Returns the trajectory's server, else its prefix's if not overloaded, else the least loaded."""
        healthy = [server for server in self._servers if server.healthy] or self._servers
        least = min(healthy, key=lambda server: server.streams)
        trajectory, prefix = request.request_id, tuple(request.prompt_ids[:_PREFIX_TOKENS])
        server = self._server_of.get(trajectory)
        if server not in healthy:
            server = self._server_of.get(prefix)
            if server not in healthy or server.streams > least.streams + _MAX_IMBALANCE:
                server = least
        for key in (trajectory, prefix):
            self._server_of[key] = server
            self._server_of.move_to_end(key)
        while len(self._server_of) > _MAX_ROUTES:
            self._server_of.popitem(last=False)
        return server
