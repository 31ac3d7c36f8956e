"""The index interface of the retrieval service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

Progress = Callable[[str, int, int], None]
"""A callback that gets an activity, the number of passages done and the total number."""


class Hit(NamedTuple):
    """The number of a passage in the corpus, from 0, and its score for the query."""

    number: int
    score: float


class Index(Protocol):
    """Ranks the passages of one corpus by their relevance to a query."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Returns up to `topk` hits per query, best first; called by one thread at a time."""
