"""Search-R1's retrieval service over HTTP: `POST /retrieve` and `GET /health`.

Queries that arrive during a search are batched into the next search. The service has no
authentication, so it listens on loopback by default.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from hone.retrieval.corpus import Corpus, Hit, Index
from hone.text import clean_text
from hone.types import JsonObject

_MAX_BODY_BYTES = 16 << 20
_MAX_TOPK, _MAX_QUERIES, _MAX_BATCH = 1000, 10_000, 256


class Service:
    """The service of one corpus and index; each search serves all waiting queries."""

    def __init__(self, corpus: Corpus, index: Index, topk: int) -> None:
        self._corpus, self._index, self._topk = corpus, index, topk
        self._waiting_queries: list[tuple[str, int, asyncio.Future[list[Hit]]]] = []
        """(query, topk, future of its hits), in order of arrival."""
        self._has_queries = asyncio.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._num_answered = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post("/retrieve", self._retrieve)
        app.router.add_get("/health", self._health)
        app.cleanup_ctx.append(self._search_loop_context)
        return app

    async def _search_loop_context(self, _: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(self._search_loop())
        yield
        task.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _search_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._has_queries.wait()
            batch = self._waiting_queries[:_MAX_BATCH]
            del self._waiting_queries[:_MAX_BATCH]
            if not self._waiting_queries:
                self._has_queries.clear()
            queries = [query for query, _, _ in batch]
            max_topk = min(max(topk for _, topk, _ in batch), len(self._corpus))
            try:
                results = await loop.run_in_executor(
                    self._executor, self._index.search, queries, max_topk
                )
                if len(results) != len(queries):
                    raise RuntimeError(f"{len(queries)} queries got {len(results)} results")
            except Exception as error:
                for _, _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, topk, future), hits in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(hits[:topk])
            self._num_answered += len(batch)

    async def _retrieve(self, request: web.Request) -> web.Response:
        try:
            queries, topk, return_scores = _parse_request(await request.read(), self._topk)
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[list[Hit]]] = [loop.create_future() for _ in queries]
        self._waiting_queries += zip(queries, [topk] * len(queries), futures, strict=True)
        if futures:
            self._has_queries.set()
        results = [
            [self._document(hit, return_scores) for hit in hits]
            for hits in await asyncio.gather(*futures)
        ]
        return web.json_response({"result": results})

    def _document(self, hit: Hit, return_scores: bool) -> JsonObject:
        document: JsonObject = self._corpus[hit.number]._asdict()
        return {"document": document, "score": hit.score} if return_scores else document

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"status": "ok", "passages": len(self._corpus), "answered": self._num_answered}
        )


def _parse_request(body: bytes, default_topk: int) -> tuple[list[str], int, bool]:
    """Returns (queries, topk, return_scores) of a request; raises ValueError for an invalid body."""
    try:
        fields = json.loads(body)
    except ValueError:
        raise ValueError("the body is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("the body must be an object with queries, topk and return_scores")
    queries, topk = fields.get("queries"), fields.get("topk")
    if not isinstance(queries, list) or not all(isinstance(q, str) for q in queries):
        raise ValueError("queries must be a list of strings")
    if len(queries) > _MAX_QUERIES:
        raise ValueError(f"{len(queries)} queries are too many; send {_MAX_QUERIES} or fewer")
    topk = default_topk if topk is None else topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= _MAX_TOPK:
        raise ValueError(f"topk={topk!r} must be an integer from 1 to {_MAX_TOPK}")
    return_scores = fields.get("return_scores", False)
    if not isinstance(return_scores, bool):
        raise ValueError("return_scores must be true or false")
    return list(map(clean_text, queries)), topk, return_scores
