"""The server refuses invalid requests before anything runs, and ends runs of lost clients."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hone.sandbox import SandboxUnavailable, server
from hone.sandbox.server import JUDGE_PATH, MAX_BODY_BYTES, RUN_PATH, SandboxServer
from hone.sandbox.service import SandboxService

from .attacks import processes_that_mention
from .test_warden import wait_until


@pytest.fixture(scope="module")
def running() -> Iterator[SandboxServer]:
    with SandboxServer(
        "127.0.0.1",
        0,
        max_concurrent=1,
        max_memory_mb=128,
        max_timeout_s=600.0,
        host_names=["box.test"],
    ) as instance:
        thread = threading.Thread(target=instance.serve_forever)
        thread.start()
        yield instance
        instance.shutdown()
        thread.join()


def send(
    instance: SandboxServer, body: bytes, path: str = RUN_PATH, **headers: Any
) -> socket.socket:
    """Sends a POST as raw bytes; header names have _ for -, and None omits a header."""
    fields = {
        "Host": f"127.0.0.1:{instance.server_address[1]}",
        "Content_Type": "application/json",
        "Content_Length": len(body),
        **headers,
    }
    lines = [f"POST {path} HTTP/1.1"]
    lines += [f"{k.replace('_', '-')}: {v}" for k, v in fields.items() if v is not None]
    connection = socket.create_connection(("127.0.0.1", instance.server_address[1]), timeout=60)
    connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
    return connection


def post(instance: SandboxServer, content: Any, **headers: Any) -> tuple[int, dict[str, Any]]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    with send(instance, body, **headers) as connection, connection.makefile("rb") as answer:
        status = int(answer.readline().split()[1])
        length = 0
        while line := answer.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return status, json.loads(answer.read(length))


def test_it_listens_on_loopback_only(running: SandboxServer) -> None:
    assert running.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    "limits",
    [{"max_concurrent": 0}, {"max_memory_mb": 2**70}, {"max_timeout_s": float("nan")}],
)
def test_a_server_without_finite_limits_does_not_start(limits: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"max_concurrent": 1, "max_memory_mb": 64}
    with pytest.raises(ValueError, match=f"{next(iter(limits))}=.* must be"):
        SandboxServer("127.0.0.1", 0, **{**usual, **limits})


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        b"",
        b"nonsense",
        b"\xff\xfe",
        b'{"code": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"code": "x", "run_timeout": ' + b"9" * 5000 + b"}",
        {"code": None},
        {"code": 5},
        {"code": "x", "stdin": ["a"]},
        {"code": "x", "language": "cpp"},
        {"code": "x", "language": ["python"]},
        *({"code": "x", "run_timeout": v} for v in ("soon", True, 0, -1, 1e308, 2**70, 601, [5])),
        b'{"code": "x", "run_timeout": NaN}',
        b'{"code": "x", "run_timeout": Infinity}',
        *({"code": "x", "memory_limit_MB": v} for v in ("1", True, 0, -5, 1e308, 2**70, 2**50)),
    ],
)
def test_malformed_requests_and_limits_are_refused_with_a_message(
    running: SandboxServer, content: Any
) -> None:
    status, answer = post(running, content)
    assert status == 400
    assert len(answer["detail"]) > 10


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content_Length": "-1"}, 400),
        ({"Content_Length": "many"}, 400),
        ({"Content_Length": "1_0"}, 400),
        ({"Content_Length": "9" * 30}, 400),
        ({"Content_Length": MAX_BODY_BYTES + 1}, 413),
        ({"Content_Length": None}, 411),
        ({"Transfer_Encoding": "chunked"}, 411),
        ({"Content_Length": None, "Transfer_Encoding": "chunked"}, 411),
        ({"Content_Type": None}, 415),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": None}, 403),
        ({"path": "/etc"}, 404),
    ],
)
def test_requests_that_our_client_does_not_send_are_refused(
    running: SandboxServer, headers: dict[str, Any], status: int
) -> None:
    assert post(running, {"code": "x"}, **headers)[0] == status


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:1"},
        {"Host": "box.test"},
        {"Host": "[::1]:80"},
        {"Content_Type": "application/json; charset=utf-8"},
        {"Host": "box.test:80", "Origin": "http://box.test:80"},
    ],
)
def test_requests_to_one_of_its_names_are_answered(
    running: SandboxServer, headers: dict[str, Any], bwrap: None
) -> None:
    status, answer = post(running, {"code": "print(1)", "memory_limit_MB": -1}, **headers)
    assert (status, answer["run_result"]["stdout"]) == (200, "1\n")


def test_it_listens_on_an_ipv6_address(bwrap: None) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with SandboxServer("::1", 0, max_concurrent=1, max_memory_mb=256) as instance:
        thread = threading.Thread(target=instance.serve_forever)
        thread.start()
        service = SandboxService(instance.url, max_concurrent=1, memory_limit_mb=256)
        assert service.run_python("print(6)").stdout == "6\n"
        instance.shutdown()
        thread.join()


def test_assertions_are_judged_in_two_boxes(running: SandboxServer, bwrap: None) -> None:
    request = {"program": "def f(x): return x + 1", "tests": "assert f(1) == 2"}
    status, answer = post(running, request, path=JUDGE_PATH)
    assert (status, answer["judgement"]["passed"]) == (200, True)
    request["tests"] = "assert f(1) == 3"
    assert post(running, request, path=JUDGE_PATH)[1]["judgement"]["passed"] is False


@pytest.mark.parametrize("path", [RUN_PATH, JUDGE_PATH])
def test_a_client_that_disconnects_ends_its_box_and_frees_its_slot(
    running: SandboxServer, bwrap: None, path: str
) -> None:
    token = f"500.{time.time_ns()}"
    forever = f"import subprocess\nsubprocess.run(['sleep', {token!r}])"
    requests = {RUN_PATH: {"code": forever}, JUDGE_PATH: {"program": forever, "tests": "f()"}}
    body = json.dumps({**requests[path], "run_timeout": 500}).encode()  # longer than `send` waits
    with send(running, body, path=path):
        assert wait_until(lambda: processes_that_mention(token))
        with send(running, body, path=path):  # waits for the only slot, and disconnects too
            pass
    status, answer = post(running, {"code": "print(1)"})
    assert (status, answer["run_result"]["stdout"]) == (200, "1\n")
    assert wait_until(lambda: processes_that_mention(token) == [])


def test_a_missing_layer_is_a_sandbox_error_and_not_a_result(
    running: SandboxServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable(**_: Any) -> None:
        raise SandboxUnavailable("no bubblewrap")

    monkeypatch.setattr(server, "run_python", unavailable)
    status, answer = post(running, {"code": "x"})
    assert (status, answer["status"], answer["message"]) == (200, "SandboxError", "no bubblewrap")
