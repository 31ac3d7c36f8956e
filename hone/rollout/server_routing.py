"""Which of several servers a request goes to: by trajectory, prefix and load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from hone.rollout.http_server import HttpServer
from hone.rollout.requests import Request

_PREFIX = 256
"""Tokens of a prompt that make requests go to the same server."""
_SLACK = 8
"""Requests that a server may have more than the least loaded one before a prefix goes elsewhere."""
_REMEMBERED = 8192


class Router:
    """Remembers the servers of recent trajectories and prefixes, whose KV cache they hold."""

    def __init__(self, servers: Sequence[HttpServer]) -> None:
        self._servers = list(servers)
        self._server_of: OrderedDict[object, HttpServer] = OrderedDict()

    def route(self, request: Request) -> HttpServer:
        """Returns the server of the trajectory, else of the prefix if it has room, else the least loaded."""
        healthy = [server for server in self._servers if server.healthy] or self._servers
        least = min(healthy, key=lambda server: server.streams)
        trajectory, prefix = request.request_id, tuple(request.prompt_ids[:_PREFIX])
        server = self._server_of.get(trajectory)
        if server not in healthy:
            server = self._server_of.get(prefix)
            if server not in healthy or server.streams > least.streams + _SLACK:
                server = least
        for key in (trajectory, prefix):
            self._server_of[key] = server
            self._server_of.move_to_end(key)
        while len(self._server_of) > _REMEMBERED:
            self._server_of.popitem(last=False)
        return server
