"""The retrieval service over a real socket: results, batching, invalid requests, a failing index."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hone.retrieval.corpus import Hit, open_corpus
from hone.retrieval.server import Service
from hone.services.json_client import ServiceError, post_json
from tests.retrieval.passages import TEXTS, write_corpus
from tests.services.hostile_peers import peak_mb


class SubstringIndex:
    """Returns the passages that contain the query; records the size of each batch."""

    service: Service

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self.num_queries = 0
        self.hold = threading.Event()
        self.hold.set()

    def search(self, queries, topk):
        self.num_queries += len(queries)
        self.hold.wait(60)
        self.batch_sizes.append(len(queries))
        if "fail" in queries:
            raise RuntimeError("index is broken")
        numbers_of = [
            [i for i, text in enumerate(TEXTS.values()) if query in text.lower()]
            for query in queries
        ]
        return [[Hit(i, 1.0) for i in numbers[:topk]] for numbers in numbers_of]


@contextmanager
def serving(folder: Path, index: Any) -> Iterator[str]:
    """Serves the small corpus on a real socket; gives the address."""
    service = Service(open_corpus(write_corpus(folder), folder), index, topk=1)
    index.service = service
    server = service.server("127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.address
    server.shutdown()
    server.server_close()
    thread.join()


def post(address: str, body: Any, timeout_s: float = 60.0) -> tuple[int, Any]:
    url = f"{address}/retrieve"
    try:
        status, content = 200, post_json(url, json.dumps(body).encode(), timeout_s=timeout_s)
    except ServiceError as error:
        status, content = error.status or 0, error.content
    return status, json.loads(content or "null")


def test_results_with_and_without_scores(tmp_path) -> None:
    with serving(tmp_path, SubstringIndex()) as address:
        with_scores = post(address, {"queries": ["river", "owl"], "topk": 2, "return_scores": True})
        without_scores = post(address, {"queries": ["river"], "topk": None})
        with urllib.request.urlopen(f"{address}/health", timeout=60) as answer:
            health = json.load(answer)
    rome = {"id": "11", "contents": f'"Rome"\n{TEXTS["Rome"]}'}
    assert with_scores[0] == 200
    rivers, owls = with_scores[1]["result"]
    assert rivers[0] == {"document": rome, "score": 1.0}
    assert [len(rivers), len(owls)] == [2, 1]
    assert without_scores == (200, {"result": [[rome]]})
    assert health == {"status": "ok", "passages": 4, "answered": 3}


def test_waiting_queries_are_searched_in_one_batch(tmp_path) -> None:
    index = SubstringIndex()
    index.hold.clear()
    with serving(tmp_path, index) as address, ThreadPoolExecutor(9) as pool:
        tasks = [pool.submit(post, address, {"queries": ["owl"]}) for _ in range(9)]
        while index.num_queries + len(index.service._waiting_requests) < 9:
            time.sleep(0.01)
        index.hold.set()
        answers = [task.result() for task in tasks]
    assert all(status == 200 and len(body["result"]) == 1 for status, body in answers)
    assert sum(index.batch_sizes) == 9
    assert len(index.batch_sizes) <= 2  # one that was searched meanwhile, and all that waited


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "must be a JSON object"),
        ({}, "list of strings"),
        ({"queries": "owl"}, "list of strings"),
        ({"queries": [1]}, "list of strings"),
        ({"queries": ["a"], "topk": 0}, "an integer"),
        ({"queries": ["a"], "topk": True}, "an integer"),
        ({"queries": ["a"], "return_scores": "yes"}, "true or false"),
        ({"queries": ["a"] * 10_001}, "send 10000 or fewer"),
        ({"queries": ["a"] * 10_000, "topk": 1000}, "send 32 queries or fewer"),
        ({"queries": ["a" * 40_000]}, "at most 32,768 are searched"),
    ],
)
def test_an_invalid_request_returns_400(tmp_path, body, message) -> None:
    with serving(tmp_path, SubstringIndex()) as address:
        status, answer = post(address, body)
    assert status == 400
    assert message in answer["detail"]


def test_the_service_answers_after_a_failed_search(tmp_path) -> None:
    with serving(tmp_path, SubstringIndex()) as address:
        failed, _ = post(address, {"queries": ["fail"]})
        status, _ = post(address, {"queries": ["owl"]})
    assert (failed, status) == (500, 200)


def test_an_index_with_too_few_results_stops_no_later_search(tmp_path) -> None:
    class ShortIndex(SubstringIndex):
        def search(self, queries, topk):
            return super().search(queries, topk) if "owl" in queries else []

    with serving(tmp_path, ShortIndex()) as address:
        failed, _ = post(address, {"queries": ["x"]})
        status, _ = post(address, {"queries": ["owl"]})
    assert (failed, status) == (500, 200)


def test_a_lone_surrogate_reaches_no_index(tmp_path) -> None:
    queries = []

    class Recorder(SubstringIndex):
        def search(self, texts, topk):
            queries.extend(texts)
            return super().search(texts, topk)

    with serving(tmp_path, Recorder()) as address:
        assert post(address, {"queries": ["a\ud800"]})[0] == 200
    assert queries == ["a?"]


class HeldIndex(SubstringIndex):
    """Each search waits until the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)

    def search(self, queries, topk):
        self.num_queries += len(queries)
        assert self.allowed.acquire(timeout=60)
        self.batch_sizes.append(len(queries))
        return [[Hit(0, 1.0)] for _ in queries]


def test_queries_of_clients_that_hung_up_are_not_searched(tmp_path, caplog) -> None:
    index = HeldIndex()
    with serving(tmp_path, index) as address, ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            assert post(address, {"queries": ["owl"] * 1000}, timeout_s=0.3) == (0, None)
        after = pool.submit(post, address, {"queries": ["owl"]})
        for _ in range(100):
            index.allowed.release()
        status, answer = after.result(60)
    assert (status, len(answer["result"])) == (200, 1)
    # At most one batch was being searched when its client hung up.
    assert sum(index.batch_sizes) <= 256 + 1
    assert not caplog.records


def test_a_request_with_many_queries_takes_turns_with_others(tmp_path) -> None:
    index = HeldIndex()
    with serving(tmp_path, index) as address, ThreadPoolExecutor(2) as pool:
        large = pool.submit(post, address, {"queries": ["owl"] * 10_000, "topk": 3})
        while not index.num_queries:
            time.sleep(0.01)
        small = pool.submit(post, address, {"queries": ["owl"]})
        while len(index.service._waiting_requests) < 2:
            time.sleep(0.01)
        for _ in range(3):  # the batch that runs, a second one, and the one with the small request
            index.allowed.release()
        assert small.result(60)[0] == 200
        assert not large.done()
        for _ in range(40):
            index.allowed.release()
        status, answer = large.result(60)
    assert (status, len(answer["result"])) == (200, 10_000)


def test_the_largest_answer_is_sent_with_bounded_memory(tmp_path) -> None:
    """A request for as many passages as allowed, in a process that measures itself."""
    text = '"t"\n' + "x" * 1000
    (tmp_path / "large.jsonl").write_text(
        "".join(json.dumps({"id": str(i), "contents": text}) + "\n" for i in range(1000))
    )
    code = "from tests.retrieval.test_server import measure; import sys; measure(*sys.argv[1:])"
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-2000:]
    growth_mb, num_bytes, num_results = map(float, run.stdout.split())
    assert num_bytes > 30e6
    assert num_results == 10_000
    assert growth_mb < 25


def measure(folder: str) -> None:
    """Prints the growth of this process, which serves 30,000 passages to a client in another process."""

    class EveryPassage:
        def search(self, queries, topk):
            return [[Hit((i + k) % 1000, 1.0) for k in range(topk)] for i in range(len(queries))]

    corpus = open_corpus(Path(folder) / "large.jsonl", Path(folder))
    server = Service(corpus, EveryPassage(), topk=3).server("127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    list(corpus)  # maps the file
    before = peak_mb()
    client = (
        "import json, sys, urllib.request as u\n"
        "body = json.dumps({'queries': ['a'] * 10_000, 'topk': 3}).encode()\n"
        "r = u.Request(sys.argv[1], body, {'Content-Type': 'application/json'})\n"
        "data = u.urlopen(r).read(); print(len(data), len(json.loads(data)['result']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", client, f"{server.address}/retrieve"],
        capture_output=True,
        text=True,
        check=True,
    )
    after = peak_mb()
    sys.stdout.write(f"{after - before} {run.stdout}")
