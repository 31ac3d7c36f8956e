"""The server refuses what is not an order before anything runs."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from hone.sandbox import SandboxUnavailable, server
from hone.sandbox.server import SandboxServer


@pytest.fixture
def running() -> Iterator[SandboxServer]:
    with SandboxServer("127.0.0.1", 0, max_concurrent=2, max_memory_mb=128) as instance:
        thread = threading.Thread(target=instance.serve_forever)
        thread.start()
        yield instance
        instance.shutdown()
        thread.join()


def post(url: str, content: Any) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(content).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_it_listens_on_loopback_only(running: SandboxServer) -> None:
    assert running.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    "content", [{}, [], {"code": "x", "language": "cpp"}, {"code": "x", "run_timeout": "soon"}]
)
def test_malformed_orders_are_unprocessable(running: SandboxServer, content: Any) -> None:
    status, answer = post(running.url, content)
    assert status == 422
    assert answer["detail"]


def test_other_paths_are_not_served(running: SandboxServer) -> None:
    assert post(running.url.replace("run_code", "etc"), {"code": "x"})[0] == 404


def test_a_missing_wall_is_a_sandbox_error_not_a_verdict(
    running: SandboxServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(**_: Any) -> None:
        raise SandboxUnavailable("no bubblewrap")

    monkeypatch.setattr(server, "run_python", unavailable)
    status, answer = post(running.url, {"code": "x"})
    assert (status, answer["status"], answer["message"]) == (200, "SandboxError", "no bubblewrap")
