"""What an index promises the service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

Progress = Callable[[str, int, int], None]
"""What is being done, how much of it is done, of how much."""


class Hit(NamedTuple):
    """A passage by its number in the corpus, and how well it fits the query."""

    number: int
    score: float


class Index(Protocol):
    """Passages of one corpus, ordered by how well they fit a query."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """For each query up to `topk` hits, best first; called by one thread at a time."""
