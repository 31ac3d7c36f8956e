"""The client of a sandbox service, with our own server and with a fake one that misbehaves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hone.sandbox import SandboxUnavailable, Status, service
from hone.sandbox.server import SandboxServer
from hone.sandbox.service import SandboxService, SandboxServiceError


@pytest.fixture(scope="module")
def url(bwrap: None) -> Iterator[str]:
    with SandboxServer("127.0.0.1", 0, max_concurrent=4, max_memory_mb=256) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


@contextmanager
def fake_service(reply: Callable[[dict[str, Any]], tuple[int, bytes]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, data = reply(json.loads(body))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serve(Handler) as url:
        yield url


@contextmanager
def serve(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/run_code"
        server.shutdown()
        thread.join()


def test_a_service_of_this_machine_needs_no_proxy_and_no_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    paths = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            paths.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            result = {"status": "Finished", "return_code": 0, "stdout": "1"}
            self.wfile.write(json.dumps({"status": "Success", "run_result": result}).encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serve(Handler) as url:
        for address in (url, url.removesuffix("/run_code"), url.removesuffix("run_code")):
            assert client(address).run_python("print(1)").stdout == "1"
    assert paths == ["/run_code"] * 3


def client(url: str, max_concurrent: int = 4, memory_limit_mb: int = 256) -> SandboxService:
    return SandboxService(url, max_concurrent=max_concurrent, memory_limit_mb=memory_limit_mb)


def test_results_are_returned_over_http(url: str) -> None:
    remote = client(url)
    result = remote.run_python("print(input() + '!')", stdin="hello")
    assert (result.status, result.stdout, result.exit_code) == (Status.OK, "hello!\n", 0)
    assert result.wall_s > 0
    result = remote.run_python("raise KeyError('gone')")
    assert (result.status, result.exit_code) == (Status.ERROR, 1)
    assert "KeyError: 'gone'" in result.stderr
    assert remote.run_python("while True: pass", timeout_s=0.5).status is Status.TIMEOUT
    assert remote.run_python("x = bytearray(1 << 30)").status is Status.MEMORY


def test_the_server_enforces_its_own_memory_limit(url: str) -> None:
    greedy = client(url, memory_limit_mb=100_000)
    assert greedy.run_python("x = bytearray(1 << 29)", memory_mb=100_000).status is Status.MEMORY


def test_the_service_judges_assertions_in_two_boxes(url: str) -> None:
    limits: dict[str, Any] = {"preamble": "", "timeout_s": 5.0, "memory_mb": 128}
    program = "def f(x): return x + 1"
    assert client(url).judge(program, "assert f(1) == 2", **limits).passed
    assert not client(url).judge(program, "assert f(1) == 3", **limits).passed


def test_a_service_with_one_box_is_refused_for_assertions() -> None:
    with fake_service(lambda _: (404, b"{}")) as url:
        with pytest.raises(SandboxUnavailable, match=r"hone\.sandbox\.server"):
            client(url).judge("", "", preamble="", timeout_s=1.0, memory_mb=64)


def test_output_is_limited_in_bytes_as_in_a_box() -> None:
    result = {"status": "Finished", "return_code": 0, "stdout": "é" * 600_000, "stderr": ""}
    answer = json.dumps({"status": "Success", "run_result": result}).encode()
    with fake_service(lambda _: (200, answer)) as url:
        result_of_run = client(url).run_python("x", timeout_s=3.0)
    assert result_of_run.status is Status.OUTPUT
    assert len(result_of_run.stdout.encode()) == 1 << 20


def test_the_request_has_the_fields_of_sandbox_fusion() -> None:
    requests: list[dict[str, Any]] = []

    def reply(request: dict[str, Any]) -> tuple[int, bytes]:
        requests.append(request)
        result = {"status": "Finished", "return_code": 0, "stdout": "ok", "stderr": ""}
        return 200, json.dumps({"status": "Success", "run_result": result}).encode()

    with fake_service(reply) as url:
        assert client(url, memory_limit_mb=64).run_python("x", stdin="y", timeout_s=3.0).ok
    assert requests == [
        {
            "code": "x",
            "stdin": "y",
            "language": "python",
            "compile_timeout": 3.0,
            "run_timeout": 3.0,
            "memory_limit_MB": 64,
        }
    ]


def test_an_answer_that_breaks_off_is_an_error_of_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_FIRST_PAUSE_S", 0.0)
    attempts = 0

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            nonlocal attempts
            attempts += 1
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"status": ')

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with serve(Handler) as url:
        with pytest.raises(SandboxServiceError, match=r"no answer in 4 attempts.*IncompleteRead"):
            client(url).run_python("x")
    assert attempts == 4


def test_at_most_max_concurrent_requests_are_sent_at_a_time() -> None:
    lock, running, highest = threading.Lock(), 0, 0
    all_slots_taken = threading.Event()

    def reply(_: dict[str, Any]) -> tuple[int, bytes]:
        nonlocal running, highest
        with lock:
            running += 1
            highest = max(highest, running)
            if highest == 3:
                all_slots_taken.set()
        all_slots_taken.wait(60)
        time.sleep(0.05)  # time for one request too many
        with lock:
            running -= 1
        return 200, b'{"status": "Success", "run_result": {"status": "Finished", "return_code": 0}}'

    with fake_service(reply) as url:
        remote = client(url, max_concurrent=3)
        threads = [threading.Thread(target=remote.run_python, args=("x",)) for _ in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert highest == 3


def test_a_busy_service_is_retried_and_a_refusal_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_FIRST_PAUSE_S", 0.01)
    calls: list[int] = []

    def busy_once(_: dict[str, Any]) -> tuple[int, bytes]:
        calls.append(1)
        good = b'{"status": "Success", "run_result": {"status": "Finished", "return_code": 0}}'
        return (503, b"busy") if len(calls) == 1 else (200, good)

    with fake_service(busy_once) as url:
        assert client(url).run_python("x").ok
    assert len(calls) == 2

    calls.clear()

    def refuse(_: dict[str, Any]) -> tuple[int, bytes]:
        calls.append(1)
        return 422, b"no such language"

    with fake_service(refuse) as url, pytest.raises(SandboxServiceError, match="no such language"):
        client(url).run_python("x")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"<html>", "no JSON"),
        (b"[]", "no 'status'"),
        (b"[" * 100_000, "no JSON"),
        (
            b'{"status": "Success", "run_result": {"status": "Finished", "execution_time": "x"}}',
            "could not convert",
        ),
        (b'{"status": "SandboxError", "message": "disk full"}', "disk full"),
        (b'{"status": "Failed", "run_result": null}', "neither run_result"),
    ],
)
def test_an_invalid_answer_is_an_error(answer: bytes, message: str) -> None:
    with fake_service(lambda _: (200, answer)) as url:
        with pytest.raises(SandboxServiceError, match=message):
            client(url).run_python("x")


def test_an_unreachable_service_is_an_error_with_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_FIRST_PAUSE_S", 0.01)
    with pytest.raises(SandboxServiceError, match=r"127\.0\.0\.1:9/.*sandbox_fusion\.url"):
        client("http://127.0.0.1:9/run_code").run_python("x")


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="http://"):
        client("ftp://x")
    with pytest.raises(ValueError, match="max_concurrent=0"):
        client("http://x", max_concurrent=0)
    with pytest.raises(ValueError, match="files and argv"):
        client("http://x").run_python("x", argv=["a"])
