"""The service over a real socket: both result forms, requests together, bad orders, a failing index."""

from __future__ import annotations

import asyncio
import threading

import aiohttp
import pytest
from aiohttp import web

from hone.retrieval.contract import Hit
from hone.retrieval.corpus import open_corpus
from hone.retrieval.server import Service
from tests.retrieval.passages import TEXTS, write_corpus


class ByWord:
    """Hits are the passages with the query in them; notes how many queries came at once."""

    def __init__(self) -> None:
        self.together: list[int] = []
        self.hold = threading.Event()
        self.hold.set()

    def search(self, queries, topk):
        self.hold.wait(10)
        self.together.append(len(queries))
        if "fail" in queries:
            raise RuntimeError("index is broken")
        found = [
            [i for i, text in enumerate(TEXTS.values()) if query in text.lower()]
            for query in queries
        ]
        return [[Hit(i, 1.0) for i in numbers[:topk]] for numbers in found]


async def _asked(tmp_path, index, ask):
    corpus = open_corpus(write_corpus(tmp_path), tmp_path)
    runner = web.AppRunner(Service(corpus, index, topk=1).application())
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
    async with session.post("/retrieve", json=body) as answer:
        return answer.status, await answer.json(content_type=None)


def test_both_result_forms(tmp_path) -> None:
    async def ask(session):
        scored = await _post(
            session, {"queries": ["river", "owl"], "topk": 2, "return_scores": True}
        )
        bare = await _post(session, {"queries": ["river"], "topk": None})
        async with session.get("/health") as health:
            return scored, bare, await health.json()

    scored, bare, health = asyncio.run(_asked(tmp_path, ByWord(), ask))
    rome = {"id": "11", "contents": f'"Rome"\n{TEXTS["Rome"]}'}
    assert scored[0] == 200
    rivers, owls = scored[1]["result"]
    assert rivers[0] == {"document": rome, "score": 1.0}
    assert [len(rivers), len(owls)] == [2, 1]
    assert bare == (200, {"result": [[rome]]})
    assert health == {"status": "ok", "passages": 4, "answered": 3}


def test_what_waits_is_searched_together(tmp_path) -> None:
    index = ByWord()
    index.hold.clear()

    async def ask(session):
        asked = [asyncio.create_task(_post(session, {"queries": ["owl"]})) for _ in range(9)]
        while len(index.together) == 0 and not all(task.done() for task in asked):
            await asyncio.sleep(0.05)
            index.hold.set()
        return await asyncio.gather(*asked)

    answers = asyncio.run(_asked(tmp_path, index, ask))
    assert all(status == 200 and len(body["result"]) == 1 for status, body in answers)
    assert sum(index.together) == 9
    assert len(index.together) < 9


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ([], "must be an object"),
        ({"queries": "owl"}, "list of strings"),
        ({"queries": [1]}, "list of strings"),
        ({"queries": ["a"], "topk": 0}, "whole number"),
        ({"queries": ["a"], "topk": True}, "whole number"),
        ({"queries": ["a"], "return_scores": "yes"}, "true or false"),
    ],
)
def test_a_bad_order_is_told(tmp_path, body, said) -> None:
    status, answer = asyncio.run(_asked(tmp_path, ByWord(), lambda s: _post(s, body)))
    assert status == 400
    assert said in answer["error"]


def test_after_a_failed_search_the_service_goes_on(tmp_path) -> None:
    async def ask(session):
        async with session.post("/retrieve", json={"queries": ["fail"]}) as failed:
            status = failed.status
        return status, await _post(session, {"queries": ["owl"]})

    failed, (status, _) = asyncio.run(_asked(tmp_path, ByWord(), ask))
    assert (failed, status) == (500, 200)
