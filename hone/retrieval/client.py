"""The client of a retrieval service; one request sends all waiting queries, up to 256.

A request has a timeout and is retried with exponential backoff. If all attempts fail, the queries
get None as their result.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

from hone.services.json_client import post_json
from hone.text import error_text
from hone.types import JsonValue

log = logging.getLogger(__name__)

MAX_BATCH = 256
MAX_TOPK, MAX_HITS = 1000, 1 << 15
"""Limits of `hone serve-retriever`: passages per query, and queries x topk of one request."""
_MAX_QUERY_CHARACTERS = 10_000
"""A longer query is truncated, so that no request of a full batch exceeds the server's 16 MiB."""
_FIRST_BACKOFF_S = 0.25


class RetrievalFailed(RuntimeError):
    """The service did not return passages."""


def retrieve(url: str, queries: Sequence[str], topk: int, timeout_s: float) -> list[list[str]]:
    """Sends one request; returns the passages of each query, best first."""
    texts = [query[:_MAX_QUERY_CHARACTERS] for query in queries]
    payload = {"queries": texts, "topk": topk, "return_scores": True}
    try:
        content = post_json(url, json.dumps(payload).encode(), timeout_s=timeout_s)
        result = json.loads(content)["result"]
        passages = [[_contents(hit) for hit in hits] for hits in result]
    except Exception as error:  # a malformed response may raise anything
        raise RetrievalFailed(f"{url}: {error_text(error)}") from error
    if len(passages) != len(queries):
        raise RetrievalFailed(f"{url}: {len(queries)} queries got {len(passages)} results")
    return passages


def _contents(hit: JsonValue) -> str:
    """Returns the text of a hit, which is a document, or a dict with a document and its score."""
    document = hit["document"] if isinstance(hit, dict) and "document" in hit else hit
    contents = document["contents"] if isinstance(document, dict) else document
    if not isinstance(contents, str):
        raise ValueError(f"a passage is not text: {str(document)[:80]}")
    return contents


class RetrievalClient:
    """Sends queries to one service from a thread that runs only while queries wait."""

    def __init__(self, url: str, topk: int, *, timeout_s: float, retries: int) -> None:
        self._url, self._topk, self._timeout_s, self._retries = url, topk, timeout_s, retries
        self._max_batch = max(1, min(MAX_BATCH, MAX_HITS // topk))
        self._lock = threading.Lock()
        self._waiting_queries: list[tuple[str, Future[list[str] | None]]] = []
        self._is_running = False
        self._is_reachable = True

    def submit(self, query: str) -> Future[list[str] | None]:
        """Returns a future of the query's passages; the result is None if the service failed."""
        future: Future[list[str] | None] = Future()
        with self._lock:
            self._waiting_queries.append((query, future))
            should_start, self._is_running = not self._is_running, True
        if should_start:
            threading.Thread(target=self._run, name="hone-retrieval", daemon=True).start()
        return future

    def _run(self) -> None:
        while True:
            with self._lock:
                waiting_queries = self._waiting_queries[: self._max_batch]
                del self._waiting_queries[: self._max_batch]
                if not waiting_queries:
                    self._is_running = False
                    return
            batch = [
                (query, future)
                for query, future in waiting_queries
                if future.set_running_or_notify_cancel()  # False for a cancelled future
            ]
            passages = self._retrieve([query for query, _ in batch]) if batch else []
            for (_, future), passages_of_query in zip(batch, passages, strict=True):
                future.set_result(passages_of_query)

    def _retrieve(self, queries: list[str]) -> Sequence[list[str] | None]:
        """Returns the passages of each query, or None for every query if all attempts fail."""
        # There is one attempt while the service is down, so that backoff delays no training step.
        for attempt in range(self._retries + 1 if self._is_reachable else 1):
            if attempt:
                time.sleep(_FIRST_BACKOFF_S * 2 ** (attempt - 1))
            try:
                passages = retrieve(self._url, queries, self._topk, self._timeout_s)
            except RetrievalFailed as error:
                failure = error
                continue
            if not self._is_reachable:
                log.warning("the retrieval service answers again: %s", self._url)
            self._is_reachable = True
            return passages
        if self._is_reachable:
            log.warning(
                "retrieval failed; searches return nothing until the service answers: %s", failure
            )
        self._is_reachable = False
        return [None] * len(queries)
