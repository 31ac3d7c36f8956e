"""Requests go to servers by trajectory, prefix and load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hone.rollout.routing import Router


def request(name: str, *prompt: int) -> Any:
    return SimpleNamespace(request_id=name, prompt_ids=list(prompt))


def test_trajectories_stay_prefixes_meet_and_busy_or_lost_servers_are_left() -> None:
    first, second = (SimpleNamespace(healthy=True, num_open_requests=0) for _ in range(2))
    servers: list[Any] = [first, second]
    router: Router[Any] = Router(servers, lambda server: server.healthy)
    assert router.route(request("a", 1)) is first
    first.num_open_requests = 1
    assert router.route(request("b", 2)) is second
    assert router.route(request("c", 1)) is first
    first.num_open_requests = 20
    assert router.route(request("d", 1)) is second
    assert router.route(request("a", 1)) is first
    first.healthy = False
    assert router.route(request("a", 1)) is second
