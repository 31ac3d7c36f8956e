"""The server of services: what it refuses, what it holds at most, and what it does for clients that left."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hone.retrieval.corpus import Hit, open_corpus
from hone.retrieval.server import Service as RetrievalService
from hone.sandbox.server import SandboxServer
from hone.services import json_server
from hone.services.json_client import ServiceError, post_json
from hone.services.json_server import Answer, Caller, JsonServer
from hone.types import JsonObject
from hone.workers.serve_reward_model import Service as RewardModelService
from hone.workers.serve_reward_model import load_worker
from tests.retrieval.passages import write_corpus
from tests.services.hostile_peers import peak_mb
from tests.workers.test_reward_model import save_classifier


class OneHit:
    def search(self, queries: Any, topk: int) -> list[list[Hit]]:
        return [[Hit(0, 1.0)] for _ in queries]


def retrieval_server(folder: Path) -> JsonServer:
    corpus = open_corpus(write_corpus(folder), folder)
    return RetrievalService(corpus, OneHit(), topk=1).server("127.0.0.1", 0, ["box.test"])


def reward_model_server(folder: Path) -> JsonServer:
    worker = load_worker(str(save_classifier(folder)), ["trainer.device=cpu"])
    return RewardModelService(worker).server("127.0.0.1", 0, ["box.test"])


def sandbox_server(folder: Path) -> JsonServer:
    return SandboxServer(
        "127.0.0.1", 0, max_concurrent=1, max_memory_mb=128, host_names=["box.test"]
    )


SERVERS: dict[str, Callable[[Path], JsonServer]] = {
    "/retrieve": retrieval_server,
    "/classify": reward_model_server,
    "/run_code": sandbox_server,
}


@contextmanager
def running(server: JsonServer) -> Iterator[JsonServer]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def plain_server(
    post: Callable[[JsonObject, Caller], Answer] = lambda body, _: body, **options: Any
) -> JsonServer:
    options = {"max_body_bytes": 1 << 20, **options}
    return JsonServer("127.0.0.1", 0, posts={"/": post}, gets={"/health": dict}, **options)


@pytest.fixture(scope="module", params=list(SERVERS))
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[JsonServer, str]]:
    with running(SERVERS[request.param](tmp_path_factory.mktemp("service"))) as server:
        yield server, request.param


def connect(server: JsonServer) -> socket.socket:
    return socket.create_connection(server.server_address[:2], timeout=60)  # type: ignore[arg-type]


def head(path: str, length: int, **headers: str | None) -> bytes:
    """Returns the head of a POST; header names have _ for -, and None omits a header."""
    fields = {"Host": "127.0.0.1", "Content_Type": "application/json", **headers}
    lines = [f"{name.replace('_', '-')}: {text}" for name, text in fields.items() if text]
    return "\r\n".join(
        [f"POST {path} HTTP/1.1", f"Content-Length: {length}", *lines, "", ""]
    ).encode()


def answer_to(server: JsonServer, request: bytes) -> bytes:
    """Returns the first bytes of the answer to a request."""
    with connect(server) as connection:
        connection.sendall(request)
        return connection.recv(1 << 16)


def test_deep_json_is_answered_with_400(service: Any, caplog: pytest.LogCaptureFixture) -> None:
    server, path = service
    body = b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(ServiceError, match="nested too deeply") as failure:
        post_json(server.address + path, body, timeout_s=60.0)
    assert failure.value.status == 400
    assert not caplog.records


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": None}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": None}, 415),
        ({"Transfer_Encoding": "chunked"}, 411),
        ({"Host": "box.test:80", "Origin": "http://box.test:80"}, 400),
        ({"Host": "localhost"}, 400),
    ],
)
def test_requests_of_web_pages_are_refused_by_every_server(
    service: Any, headers: dict[str, str | None], status: int
) -> None:
    server, path = service
    answer = answer_to(server, head(path, 2, **headers) + b"{}")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    if status == 403:
        lines = "".join(f"{name}: {text}\r\n" for name, text in headers.items() if text)
        answer = answer_to(server, f"GET /health HTTP/1.1\r\n{lines}\r\n".encode())
        assert answer.startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 404 ")), answer


def test_a_refused_body_does_not_hide_the_answer() -> None:
    with running(plain_server()) as server:
        with pytest.raises(ServiceError, match="at most 1048576 are allowed") as failure:
            post_json(server.address + "/", bytes(60 << 20), timeout_s=60.0)
    assert failure.value.status == 413


def test_bodies_that_are_held_open_have_bounded_memory() -> None:
    """20 clients send 29 of 30 MB each and wait; the server runs in a process of its own."""
    code = "from tests.services.test_json_server import serve_sandbox; serve_sandbox()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with contextlib.ExitStack() as stack:
            connections = []
            for _ in range(20):
                connection = socket.create_connection(("127.0.0.1", port), timeout=60)
                connections.append(stack.enter_context(connection))
                connection.setblocking(False)
            send_until_stuck(connections, head("/run_code", 30 << 20) + bytes(29 << 20))
            with pytest.raises(ServiceError, match="must be text"):
                post_json(f"http://127.0.0.1:{port}/run_code", b'{"code": 1}', timeout_s=60.0)
        process.stdin.close()
        growth_mb = float(process.stdout.readline())
    assert 30 < growth_mb < 300  # 634 without a limit


def send_until_stuck(connections: list[socket.socket], request: bytes) -> None:
    """Sends a request over each connection until the server, which has read some, stops reading."""
    sent, last_s, end_s = [0] * len(connections), time.monotonic(), time.monotonic() + 60
    while time.monotonic() < end_s and (sum(sent) < 100 << 20 or time.monotonic() - last_s < 1.0):
        for index, connection in enumerate(connections):
            with contextlib.suppress(BlockingIOError):
                count = connection.send(request[sent[index] : sent[index] + (1 << 20)])
                sent[index] += count
                last_s = time.monotonic() if count else last_s
        time.sleep(0.001)


def serve_sandbox() -> None:
    """Serves until standard input ends; prints the port, and then how far the memory has grown."""
    with running(sandbox_server(Path())) as server:
        before = peak_mb()
        sys.stdout.write(f"{server.server_address[1]}\n")
        sys.stdout.flush()
        sys.stdin.read()
        after = peak_mb()
        sys.stdout.write(f"{after - before}\n")


def test_a_connection_above_the_limit_waits_for_another_to_end() -> None:
    with running(plain_server(max_connections=3)) as server:
        idle = [connect(server) for _ in range(3)]
        with pytest.raises(ServiceError):
            post_json(server.address + "/", b"{}", timeout_s=1.0)
        idle.pop().close()
        assert post_json(server.address + "/", b"{}", timeout_s=60.0) == b"{}"
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("request_start", [b"POST / HT", head("/", 1000) + b"{"])
def test_a_client_that_drips_its_request_is_disconnected(
    request_start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_server, "_READ_TIMEOUT_S", 1.0)
    start_s = time.monotonic()
    with running(plain_server()) as server, connect(server) as connection:
        connection.sendall(request_start)
        connection.settimeout(0.1)
        while time.monotonic() - start_s < 30:
            try:
                connection.sendall(b" ")
                if not connection.recv(1 << 16):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
    assert time.monotonic() - start_s < 30


def test_a_client_that_does_not_read_its_answer_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_server, "_WRITE_TIMEOUT_S", 1.0)

    def endless_answer(body: JsonObject, caller: Caller) -> Iterator[bytes]:
        while True:
            yield bytes(1 << 20)

    with running(plain_server(endless_answer, max_connections=1)) as server:
        with connect(server) as connection:
            connection.sendall(head("/", 2) + b"{}")
            with connect(server) as waiting:
                waiting.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert waiting.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_an_answer_in_parts_is_read_by_clients_of_http_1_0_too() -> None:
    with running(plain_server(lambda *_: iter([b'{"a"', b": 1}"]))) as server:
        assert post_json(server.address + "/", b"{}", timeout_s=60.0) == b'{"a": 1}'
        with connect(server) as connection:
            connection.sendall(head("/", 2).replace(b"HTTP/1.1", b"HTTP/1.0") + b"{}")
            with connection.makefile("rb") as stream:
                assert stream.read().endswith(b'\r\n\r\n{"a": 1}')


def test_failures_and_lost_connections_do_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(body: JsonObject, caller: Caller) -> Answer:
        if not body:
            raise RuntimeError("broken")
        while not caller.has_disconnected():
            time.sleep(0.01)
        caller.check()
        return {}

    with running(plain_server(fail)) as server:
        for _ in range(20):
            with connect(server) as connection:
                connection.sendall(head("/", 8) + b'{"a": 1}')
        for _ in range(20):
            with connect(server) as connection:
                connection.sendall(head("/", 1000) + b"{")
        assert not caplog.records
        for _ in range(20):
            with pytest.raises(ServiceError, match="RuntimeError; the log") as failure:
                post_json(server.address + "/", b"{}", timeout_s=60.0)
            assert failure.value.status == 500
    assert len(caplog.records) < 4  # one in ten seconds
    assert json.loads(failure.value.content)["detail"].startswith("RuntimeError")
