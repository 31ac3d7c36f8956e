"""Search-R1's retrieval service over HTTP: `POST /retrieve` and `GET /health`.

Queries that arrive during a search are batched into the next search. Requests with many queries take turns
with others, and the queries of clients that hang up are dropped.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from hone.retrieval.client import MAX_BATCH, MAX_HITS, MAX_TOPK
from hone.retrieval.corpus import Corpus, Hit, Index
from hone.services.json_server import Caller, ClientDisconnected, JsonServer
from hone.text import clean_text
from hone.types import JsonObject

_MAX_BODY_BYTES = 16 << 20
_MAX_QUERIES, _MAX_QUERY_CHARACTERS = 10_000, 1 << 15
_PART_BYTES = 1 << 16


class _Request:
    """The queries of one request, and the hits of those that were searched."""

    def __init__(self, queries: list[str], topk: int, caller: Caller) -> None:
        self.queries, self.topk, self.caller = queries, topk, caller
        self.hits: list[list[Hit]] = []
        self.num_started = 0
        self.future: Future[list[list[Hit]]] = Future()


class Service:
    """The service of one corpus and index; one thread searches."""

    def __init__(self, corpus: Corpus, index: Index, topk: int) -> None:
        self._corpus, self._index, self._topk = corpus, index, topk
        self._lock = threading.Lock()
        self._waiting_requests: deque[_Request] = deque()
        self._is_searching = False
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._num_answered = 0

    @property
    def num_passages(self) -> int:
        return len(self._corpus)

    def server(self, host: str, port: int, host_names: Sequence[str] = ()) -> JsonServer:
        """Returns a server of this service, which listens."""
        return JsonServer(
            host,
            port,
            posts={"/retrieve": self._retrieve},
            gets={"/health": self._health},
            max_body_bytes=_MAX_BODY_BYTES,
            host_names=host_names,
        )

    def _retrieve(self, body: JsonObject, caller: Caller) -> Iterator[bytes]:
        queries, topk, return_scores = _parse_request(body, self._topk)
        request = _Request(queries, topk, caller)
        if queries:
            with self._lock:
                self._waiting_requests.append(request)
                should_start, self._is_searching = not self._is_searching, True
            if should_start:
                self._executor.submit(self._search_all)
            request.future.result()
        return self._answer_parts(request.hits, return_scores)

    def _search_all(self) -> None:
        """Searches until no request waits."""
        while True:
            with self._lock:
                batch = self._next_batch()
                if not batch:
                    self._is_searching = False
                    return
            try:
                self._search(batch)
            except Exception as error:
                failure = RuntimeError("the search failed")
                failure.__cause__ = error
                for request, _ in batch:
                    if not request.future.done():
                        request.future.set_exception(failure)

    def _next_batch(self) -> list[tuple[_Request, list[str]]]:
        """Returns up to MAX_BATCH queries; a request that has more of them goes to the end of the queue."""
        batch: list[tuple[_Request, list[str]]] = []
        num_free = MAX_BATCH
        while num_free and self._waiting_requests:
            request = self._waiting_requests.popleft()
            if request.future.done():  # the search of other queries failed
                continue
            if request.caller.has_disconnected():
                request.future.set_exception(ClientDisconnected())
                continue
            queries = request.queries[request.num_started :][:num_free]
            request.num_started += len(queries)
            num_free -= len(queries)
            batch.append((request, queries))
            if request.num_started < len(request.queries):
                self._waiting_requests.append(request)
        return batch

    def _search(self, batch: list[tuple[_Request, list[str]]]) -> None:
        all_queries = [query for _, queries in batch for query in queries]
        max_topk = min(max(request.topk for request, _ in batch), len(self._corpus))
        results = self._index.search(all_queries, max_topk)
        if len(results) != len(all_queries):
            raise RuntimeError(f"{len(all_queries)} queries got {len(results)} results")
        self._num_answered += len(all_queries)
        results_iterator = iter(results)
        for request, queries in batch:
            request.hits += [next(results_iterator)[: request.topk] for _ in queries]
            if len(request.hits) == len(request.queries):
                request.future.set_result(request.hits)

    def _answer_parts(self, results: list[list[Hit]], return_scores: bool) -> Iterator[bytes]:
        """Returns the text of the answer in parts, so that no answer is in memory as a whole."""
        text, separator = '{"result": [', ""
        for hits in results:
            documents = [self._document(hit, return_scores) for hit in hits]
            text, separator = text + separator + json.dumps(documents), ", "
            if len(text) >= _PART_BYTES:
                yield text.encode()
                text = ""
        yield (text + "]}").encode()

    def _document(self, hit: Hit, return_scores: bool) -> JsonObject:
        document: JsonObject = self._corpus[hit.number]._asdict()
        return {"document": document, "score": hit.score} if return_scores else document

    def _health(self) -> JsonObject:
        return {"status": "ok", "passages": self.num_passages, "answered": self._num_answered}


def _parse_request(fields: JsonObject, default_topk: int) -> tuple[list[str], int, bool]:
    """Returns (queries, topk, return_scores) of a request; raises ValueError for an invalid body."""
    queries, topk = fields.get("queries"), fields.get("topk")
    texts = (
        [query for query in queries if isinstance(query, str)] if isinstance(queries, list) else []
    )
    if texts != queries:
        raise ValueError("queries must be a list of strings")
    if len(texts) > _MAX_QUERIES:
        raise ValueError(f"{len(texts)} queries are too many; send {_MAX_QUERIES} or fewer")
    longest = max(map(len, texts), default=0)
    if longest > _MAX_QUERY_CHARACTERS:
        raise ValueError(
            f"a query has {longest:,} characters; at most {_MAX_QUERY_CHARACTERS:,} are searched"
        )
    topk = default_topk if topk is None else topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk={topk!r:.80} must be an integer from 1 to {MAX_TOPK}")
    if len(texts) * topk > MAX_HITS:
        raise ValueError(
            f"{len(texts)} queries with topk={topk} are more than {MAX_HITS:,} passages; send "
            f"{MAX_HITS // topk} queries or fewer per request"
        )
    return_scores = fields.get("return_scores", False)
    if not isinstance(return_scores, bool):
        raise ValueError("return_scores must be true or false")
    return list(map(clean_text, texts)), topk, return_scores
