"""The client batches queries, returns None after failures, and uses a service again once it answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from hone.retrieval import server
from hone.retrieval.client import RetrievalClient, RetrievalFailed, retrieve


class Service(BaseHTTPRequestHandler):
    """Returns each query as its own passage, in the class's format."""

    to_hit: Any = staticmethod(lambda query: {"document": {"contents": query}, "score": 1.0})
    batch_sizes: ClassVar[list[int]] = []
    failures = 0
    hold = threading.Event()

    def do_POST(self) -> None:
        service_class = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        service_class.hold.wait(60)
        service_class.batch_sizes.append(len(body["queries"]))
        service_class.failures -= 1
        self.send_response(500 if service_class.failures >= 0 else 200)
        self.end_headers()
        if service_class.failures < 0:
            result = [[service_class.to_hit(query)] for query in body["queries"]]
            self.wfile.write(json.dumps({"result": result}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[tuple[type[Service], str]]:
    service_class = type(
        "IsolatedService", (Service,), {"batch_sizes": [], "failures": 0, "hold": threading.Event()}
    )
    service_class.hold.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), service_class)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield service_class, f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "to_hit", [lambda q: {"document": {"contents": q}}, lambda q: {"id": "1", "contents": q}, str]
)
def test_every_response_format_is_parsed(service: Any, to_hit: Any) -> None:
    service_class, url = service
    service_class.to_hit = staticmethod(to_hit)
    assert retrieve(url, ["a", "b"], 1, 60.0) == [["a"], ["b"]]


def test_a_response_without_passages_raises(service: Any) -> None:
    service_class, url = service
    service_class.to_hit = staticmethod(lambda query: {"document": {"text": query}})
    with pytest.raises(RetrievalFailed, match="KeyError"):
        retrieve(url, ["a"], 1, 60.0)


def test_waiting_queries_are_sent_in_one_request(service: Any) -> None:
    service_class, url = service
    service_class.hold.clear()
    client = RetrievalClient(url, 1, timeout_s=60, retries=0)
    futures = [client.submit(str(number)) for number in range(20)]
    service_class.hold.set()
    assert [future.result(60) for future in futures] == [[str(number)] for number in range(20)]
    assert sum(service_class.batch_sizes) == 20
    assert len(service_class.batch_sizes) <= 2


def test_a_failed_request_is_retried_and_then_returns_none(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service_class, url = service
    delays: list[float] = []
    monkeypatch.setattr("hone.retrieval.client.time.sleep", delays.append)
    client = RetrievalClient(url, 1, timeout_s=60, retries=2)
    service_class.failures = 2
    assert client.submit("a").result(60) == ["a"]
    assert delays == [0.25, 0.5]
    service_class.failures = 4
    assert client.submit("b").result(60) is None
    assert client.submit("c").result(60) is None  # one attempt: the service is known to be down
    assert len(service_class.batch_sizes) == 3 + 3 + 1
    assert client.submit("d").result(60) == ["d"]


def test_a_cancelled_query_does_not_affect_others(service: Any) -> None:
    service_class, url = service
    service_class.hold.clear()
    client = RetrievalClient(url, 1, timeout_s=60, retries=0)
    first, second, third = (client.submit(query) for query in "abc")
    second.cancel()
    service_class.hold.set()
    assert (first.result(60), third.result(60)) == (["a"], ["c"])


def test_an_invalid_url_returns_none() -> None:
    client = RetrievalClient("localhost/retrieve", 3, timeout_s=1.0, retries=0)
    assert client.submit("one").result(60) is None
    assert client.submit("two").result(60) is None


def test_long_queries_do_not_exceed_the_servers_limit(service: Any) -> None:
    service_class, url = service
    service_class.to_hit = staticmethod(lambda query: str(len(query)))
    sizes: list[int] = []
    answer = service_class.do_POST

    def record_size(handler: Any) -> None:
        sizes.append(int(handler.headers["Content-Length"]))
        answer(handler)

    service_class.do_POST = record_size
    passages = retrieve(url, ["\u5b57" * 50_000] * 255 + ["owl"], 1, 60.0)
    assert (passages[0], passages[-1]) == (["10000"], ["3"])
    assert sizes[0] < server._MAX_BODY_BYTES
