"""The retrieval service over a real socket: results, batching, invalid requests, a failing index."""

from __future__ import annotations

import asyncio
import threading

import aiohttp
import pytest
from aiohttp import web

from hone.retrieval.corpus import Hit, open_corpus
from hone.retrieval.server import Service
from tests.retrieval.passages import TEXTS, write_corpus


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


async def _with_service(tmp_path, index, ask):
    corpus = open_corpus(write_corpus(tmp_path), tmp_path)
    index.service = Service(corpus, index, topk=1)
    runner = web.AppRunner(index.service.application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            return await ask(session)
    finally:
        await runner.cleanup()


async def _post(session, body):
    async with session.post("/retrieve", json=body) as response:
        return response.status, await response.json(content_type=None)


def test_results_with_and_without_scores(tmp_path) -> None:
    async def ask(session):
        with_scores = await _post(
            session, {"queries": ["river", "owl"], "topk": 2, "return_scores": True}
        )
        without_scores = await _post(session, {"queries": ["river"], "topk": None})
        async with session.get("/health") as health:
            return with_scores, without_scores, await health.json()

    with_scores, without_scores, health = asyncio.run(
        _with_service(tmp_path, SubstringIndex(), ask)
    )
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

    async def ask(session):
        tasks = [asyncio.create_task(_post(session, {"queries": ["owl"]})) for _ in range(9)]
        while index.num_queries + len(index.service._waiting_queries) < 9:
            await asyncio.sleep(0.01)
        index.hold.set()
        return await asyncio.gather(*tasks)

    answers = asyncio.run(_with_service(tmp_path, index, ask))
    assert all(status == 200 and len(body["result"]) == 1 for status, body in answers)
    assert sum(index.batch_sizes) == 9
    assert len(index.batch_sizes) <= 2  # one that was searched meanwhile, and all that waited


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "must be an object"),
        ({"queries": "owl"}, "list of strings"),
        ({"queries": [1]}, "list of strings"),
        ({"queries": ["a"], "topk": 0}, "an integer"),
        ({"queries": ["a"], "topk": True}, "an integer"),
        ({"queries": ["a"], "return_scores": "yes"}, "true or false"),
    ],
)
def test_an_invalid_request_returns_400(tmp_path, body, message) -> None:
    status, answer = asyncio.run(
        _with_service(tmp_path, SubstringIndex(), lambda s: _post(s, body))
    )
    assert status == 400
    assert message in answer["error"]


def test_the_service_answers_after_a_failed_search(tmp_path) -> None:
    async def ask(session):
        async with session.post("/retrieve", json={"queries": ["fail"]}) as failed:
            status = failed.status
        return status, await _post(session, {"queries": ["owl"]})

    failed, (status, _) = asyncio.run(_with_service(tmp_path, SubstringIndex(), ask))
    assert (failed, status) == (500, 200)


def test_an_index_with_too_few_results_stops_no_later_search(tmp_path) -> None:
    class ShortIndex(SubstringIndex):
        def search(self, queries, topk):
            return super().search(queries, topk) if "owl" in queries else []

    async def ask(session):
        async with session.post("/retrieve", json={"queries": ["x"]}) as failed:
            status = failed.status
        return status, await asyncio.wait_for(_post(session, {"queries": ["owl"]}), 60)

    failed, (status, _) = asyncio.run(_with_service(tmp_path, ShortIndex(), ask))
    assert (failed, status) == (500, 200)


def test_a_lone_surrogate_reaches_no_index(tmp_path) -> None:
    queries = []

    class Recorder(SubstringIndex):
        def search(self, texts, topk):
            queries.extend(texts)
            return super().search(texts, topk)

    body = {"queries": ["a\ud800"]}
    assert asyncio.run(_with_service(tmp_path, Recorder(), lambda s: _post(s, body)))[0] == 200
    assert queries == ["a?"]
