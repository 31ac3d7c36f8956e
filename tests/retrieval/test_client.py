"""The client: queries travel together, failures give None, and a service that returns is used again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from hone.retrieval.client import RetrievalClient, RetrievalFailed, retrieve


class Service(BaseHTTPRequestHandler):
    """Answers with the query itself, in the form that the class says."""

    form: Any = staticmethod(lambda query: {"document": {"contents": query}, "score": 1.0})
    sizes: ClassVar[list[int]] = []
    failures = 0
    hold = threading.Event()

    def do_POST(self) -> None:
        kind = type(self)
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind.hold.wait(10)
        kind.sizes.append(len(order["queries"]))
        kind.failures -= 1
        self.send_response(500 if kind.failures >= 0 else 200)
        self.end_headers()
        if kind.failures < 0:
            result = [[kind.form(query)] for query in order["queries"]]
            self.wfile.write(json.dumps({"result": result}).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[tuple[type[Service], str]]:
    kind = type("Own", (Service,), {"sizes": [], "failures": 0, "hold": threading.Event()})
    kind.hold.set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield kind, f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "form", [lambda q: {"document": {"contents": q}}, lambda q: {"id": "1", "contents": q}, str]
)
def test_passages_are_read_in_every_form(service: Any, form: Any) -> None:
    kind, url = service
    kind.form = staticmethod(form)
    assert retrieve(url, ["a", "b"], 1, 5.0) == [["a"], ["b"]]


def test_an_answer_without_passages_is_a_failure(service: Any) -> None:
    kind, url = service
    kind.form = staticmethod(lambda query: {"document": {"text": query}})
    with pytest.raises(RetrievalFailed, match="KeyError"):
        retrieve(url, ["a"], 1, 5.0)


def test_queries_that_wait_travel_together(service: Any) -> None:
    kind, url = service
    kind.hold.clear()
    client = RetrievalClient(url, 1, timeout_s=10, retries=0)
    futures = [client.ask(str(number)) for number in range(20)]
    kind.hold.set()
    assert [future.result(10) for future in futures] == [[str(number)] for number in range(20)]
    assert sum(kind.sizes) == 20
    assert len(kind.sizes) <= 3


def test_a_failed_request_is_tried_again_and_then_given_up(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, url = service
    pauses: list[float] = []
    monkeypatch.setattr("hone.retrieval.client.time.sleep", pauses.append)
    client = RetrievalClient(url, 1, timeout_s=10, retries=2)
    kind.failures = 2
    assert client.ask("a").result(10) == ["a"]
    assert pauses == [0.25, 0.5]
    kind.failures = 4
    assert client.ask("b").result(10) is None
    assert client.ask("c").result(10) is None  # one attempt: the service is known to be down
    assert len(kind.sizes) == 3 + 3 + 1
    assert client.ask("d").result(10) == ["d"]


def test_a_cancelled_query_harms_no_other(service: Any) -> None:
    kind, url = service
    kind.hold.clear()
    client = RetrievalClient(url, 1, timeout_s=10, retries=0)
    first, second, third = (client.ask(query) for query in "abc")
    second.cancel()
    kind.hold.set()
    assert (first.result(10), third.result(10)) == (["a"], ["c"])


def test_an_address_that_is_none_fails_like_a_service_that_is_down() -> None:
    client = RetrievalClient("localhost/retrieve", 3, timeout_s=1.0, retries=0)
    assert client.ask("one").result(10) is None
    assert client.ask("two").result(10) is None
