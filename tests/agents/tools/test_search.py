"""The search tool sends questions to the service and returns its passages as text."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from hone.agents.tools.contract import ToolError
from hone.agents.tools.search import SearchTool

REQUESTS: list[Any] = []


class Service(BaseHTTPRequestHandler):
    contents: Any = "Paris\nCapital of France."

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        REQUESTS.append(query)
        hit = {"document": {"id": "7", "contents": self.contents}, "score": 1.0}
        body = json.dumps({"result": [[hit] * query["topk"] for _ in query["queries"]]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Service)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/retrieve"
    server.shutdown()
    server.server_close()


def test_passages_are_numbered_and_questions_apart(url: str) -> None:
    tool = SearchTool({"retrieval_service_url": url, "topk": 2, "type": "native"})
    assert tool.name == "search"
    answer, reward, metrics = asyncio.run(tool.execute("i", {"query_list": ["a", "b"]}))
    one = "Doc 1 (Title: Paris)\nCapital of France.\n\nDoc 2 (Title: Paris)\nCapital of France."
    assert json.loads(answer.text or "") == {"result": f"{one}\n---\n{one}"}
    assert (reward, metrics) == (0.0, {"query_count": 2, "total_results": 4})
    assert REQUESTS[-1] == {"queries": ["a", "b"], "topk": 2, "return_scores": True}


def test_a_service_of_this_machine_needs_no_proxy(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    tool = SearchTool({"retrieval_service_url": url})
    _, _, metrics = asyncio.run(tool.execute("i", {"query_list": ["a"]}))
    assert metrics["query_count"] == 1


def test_what_is_no_list_of_questions_and_no_url_is_refused(url: str) -> None:
    tool = SearchTool({"retrieval_service_url": url})
    with pytest.raises(ToolError, match="list of questions"):
        asyncio.run(tool.execute("i", {"query_list": "a"}))
    with pytest.raises(ToolError, match="not an http"):
        SearchTool({"topk": 3})


def test_a_long_question_is_sent_whole_and_contents_of_any_type_become_text(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Service, "contents", 42)
    tool = SearchTool({"retrieval_service_url": url, "topk": 1})
    question = "why? " * 4000
    answer, _, _ = asyncio.run(tool.execute("i", {"query_list": [question]}))
    assert json.loads(answer.text or "") == {"result": "Doc 1 (Title: 42)\n"}
    assert REQUESTS[-1]["queries"] == [question]


def test_the_error_that_the_model_reads_has_no_url() -> None:
    tool = SearchTool({"retrieval_service_url": "http://127.0.0.1:9/retrieve?key=secret"})
    with pytest.raises(OSError) as failure:
        asyncio.run(tool.execute("i", {"query_list": ["a"]}))
    assert "secret" not in str(failure.value)
