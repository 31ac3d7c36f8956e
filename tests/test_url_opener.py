"""A service on this machine is reached without the environment's proxy, another one through it."""

from __future__ import annotations

import urllib.request

import pytest

from hone.url_opener import service_opener


class Refuses(urllib.request.HTTPRedirectHandler):
    pass


@pytest.mark.parametrize(
    ("url", "has_proxy"),
    [
        ("http://127.0.0.1:8000/retrieve", False),
        ("http://localhost/run_code", False),
        ("http://[::1]:9/score", False),
        ("http://10.0.0.7:8000/retrieve", True),
        ("http://localhost.example.org/", True),
    ],
)
def test_only_other_machines_are_reached_through_the_proxy(
    url: str, has_proxy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    service_opener.cache_clear()
    opener = service_opener(url, Refuses)
    service_opener.cache_clear()
    kinds = [type(handler) for handler in opener.handlers]
    assert (urllib.request.ProxyHandler in kinds) is has_proxy
    assert Refuses in kinds
    assert urllib.request.HTTPRedirectHandler not in kinds
