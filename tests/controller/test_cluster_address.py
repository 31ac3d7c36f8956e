"""A cluster that is not there is told at once, with who named it."""

from __future__ import annotations

import socket

import pytest

from hone.controller.ray_start import check_reachable
from hone.controller.worker import free_port

KEY = "ray_kwargs.ray_init.address"


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_refused_with_the_way_out(scheme: str) -> None:
    address = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=rf"{KEY}={address}: nothing answers.*ray start"):
        check_reachable(address, KEY)


def test_one_that_answers_is_fine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_reachable(f"127.0.0.1:{server.getsockname()[1]}", KEY)


@pytest.mark.parametrize("address", [None, "", "auto", "local"])
def test_what_names_no_place_is_left_to_ray(address: str | None) -> None:
    check_reachable(address, KEY)


def test_an_address_without_a_port_is_refused() -> None:
    with pytest.raises(ValueError, match="RAY_ADDRESS=somewhere: give host:port"):
        check_reachable("somewhere", "RAY_ADDRESS")


def test_ray_is_not_asked_to_join_what_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from hone.controller.ray_start import start_ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("asked"))
    nowhere = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=KEY):
        start_ray({"address": nowhere})
    monkeypatch.setenv("RAY_ADDRESS", nowhere)
    with pytest.raises(ConnectionError, match="RAY_ADDRESS="):
        start_ray({"num_cpus": 2})
