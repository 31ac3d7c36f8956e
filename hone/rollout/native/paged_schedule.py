"""Who decodes: the requests that wait, the rows that have pages, and who gives pages back.

Bookkeeping of the host over a pool of pages; no tensor is touched. paged_core.py computes what is
scheduled here, paged_cache.py knows which page holds which tokens.
"""

from __future__ import annotations

import math
from bisect import insort_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hone.rollout.contract import RolloutError, StopReason
from hone.rollout.native.paged_cache import PagePool
from hone.rollout.native.paged_rows import MAX_STOPS
from hone.rollout.requests import Request, RequestRules, chosen

PAGE_SIZE = 16
STEPS_PER_CHUNK = 32
"""Tokens drawn between two looks of the host: enough to hide them, few enough to refill slots soon."""
STEPS_UNWATCHED = 64
"""The same where no request waits for a slot."""


@dataclass
class Row:
    """A running sequence: its request and its pages."""

    request: Request
    pages: list[int]
    stops: list[int]
    careful: bool
    """Its end is not seen by the GPU alone: stop strings, or too many stop tokens."""
    known: int = 0
    """Tokens whose keys were found in the cache when it was admitted."""
    weights: int = 0
    """Which weights its first keys were computed with, see `PagedSchedule.forget`."""

    @property
    def limit(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


@dataclass(frozen=True)
class PagedRules(RequestRules):
    """The rules of every engine, and no more tokens than the pages were laid out for."""

    longest: int = field(kw_only=True)
    pages: int = field(kw_only=True)

    def check(self, request: Request) -> None:
        super().check(request)
        reach = len(request.prompt_ids) + request.sampling.max_tokens
        if reach > self.longest:
            raise RolloutError(
                f"request {request.request_id} may reach {reach} tokens, but the engine was built "
                f"for {self.longest}; raise rollout.max_model_len"
            )
        if -(-reach // PAGE_SIZE) >= self.pages:
            raise RolloutError(
                f"request {request.request_id} may reach {reach} tokens, more than the whole cache "
                f"of {self.pages} pages of {PAGE_SIZE}; raise rollout.gpu_memory_utilization"
            )


class PagedSchedule:
    """The waiting line and the running rows, which share one pool of pages."""

    def __init__(
        self,
        pool: PagePool,
        rules: PagedRules,
        *,
        max_rows: int,
        prefill_limit: int,
        prefix_caching: bool,
    ) -> None:
        self._pool, self._rules = pool, rules
        self._max_rows, self._prefill_limit = max_rows, prefill_limit
        self._prefix_caching = prefix_caching
        self._spare = max_rows * (STEPS_UNWATCHED // PAGE_SIZE)
        """Pages kept for the next chunk of every other row before one may take ahead."""
        self._waiting: list[Request] = []  # whoever starts first stands last
        self.active: list[Row] = []
        self._weights = 0
        self.preempted = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self.active)

    def add(self, request: Request) -> None:
        """Queue it; the longest allowed starts first, in order of arrival among equals.

        So no long one is left to the end, alone in the batch. Preempted ones go before all new ones.
        """
        self._rules.check(request)
        insort_left(self._waiting, request, key=_precedence)

    def abort(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """End these requests (None: all) with what they have."""
        waiting = chosen(reversed(self._waiting), request_ids)
        running = chosen((row.request for row in self.active), request_ids)
        for request in [*running, *waiting]:
            request.stop_reason = StopReason.ABORT
        for row in self.active:
            if row.request.stop_reason is not None:
                self._pool.release(row.pages)
        self.active = [row for row in self.active if row.request.stop_reason is None]
        self._waiting = [r for r in self._waiting if r.stop_reason is None]
        return [*running, *waiting]

    def steps(self, drawn: int = 0) -> int:
        """Decode steps until the host looks again: no more than the longest sequence still needs.

        drawn: tokens of every sequence that the host has not seen yet.
        """
        most = STEPS_PER_CHUNK if self._waiting else STEPS_UNWATCHED
        left = [row.limit - row.request.length - drawn for row in self.active]
        return max(1 - drawn, min(most, max(left, default=most)))

    def ahead(self, counts: Sequence[int]) -> int:
        """Steps to go on with before the host has taken up these many new tokens of each sequence.

        0 where it must look first: something waits for room, or a sequence may end or lack a page.
        """
        if self._waiting:
            return 0
        left = 0
        for row, count in zip(self.active, counts, strict=False):  # none is left after an abort
            if row.careful or row.request.cancelled or len(row.pages) * PAGE_SIZE < row.limit:
                return 0
            left = max(left, row.limit - row.request.length - count)
        return min(STEPS_UNWATCHED, left)

    def extend(self, steps: int) -> None:
        """Pages for the next chunk, oldest sequences first; the newest give theirs back if need be."""
        at = 0
        while at < len(self.active):
            row = self.active[at]
            need = self._pages_needed(row, steps)
            if need <= self._pool.available:
                row.pages += self._pool.take(need)
                at += 1
            else:
                self._preempt(self.active.pop())

    def admit(self, steps: int) -> list[Row]:
        """What fits the free rows, the pages and, each distinct prompt counted once, one prefill.

        The rows become active; a group's later samples hold the full pages of its first.
        """
        pool, admitted = self._pool, list[Row]()
        tokens, seen = 0, dict[tuple[int, ...], Row]()
        while self._waiting and len(self.active) + len(admitted) < self._max_rows:
            request = self._waiting[-1]
            ids = tuple(request.prompt_ids + request.token_ids)
            leader = seen.get(ids)
            if leader is not None:
                found = leader.pages[: len(ids) // PAGE_SIZE]
            else:
                found = pool.find(ids) if self._prefix_caching else []
            new = 0 if leader is not None else len(ids) - len(found) * PAGE_SIZE
            if admitted and tokens + new > self._prefill_limit:
                break
            row = self._row(request, found)
            pool.hold(found)
            need = self._pages_needed(row, steps + 1)
            if need > pool.available:
                pool.release(found)
                if not admitted and not self.active:
                    raise RolloutError(
                        f"request {request.request_id} does not fit the empty cache; this is a defect"
                    )
                break
            row.pages = [*found, *pool.take(need)]
            seen.setdefault(ids, row)
            tokens += new
            admitted.append(row)
            self._waiting.pop()
        self.active += admitted
        return admitted

    def forget(self) -> None:
        """Pages computed until now are found no more, nor those of rows that still run."""
        self._weights += 1
        self._pool.forget_all()

    def remember(self, row: Row, tokens: list[int] | tuple[int, ...]) -> None:
        """Let later requests find the full pages of `tokens`, which this row computed."""
        if self._may_be_found(row):
            self._pool.remember(tokens, row.pages)

    def _may_be_found(self, row: Row) -> bool:
        return self._prefix_caching and row.weights == self._weights

    def retire(self) -> list[Request]:
        """Take out the finished rows; their pages can be found until the room is needed."""
        staying: list[Row] = []
        finished: list[Request] = []
        for row in self.active:
            if row.request.stop_reason is None:
                staying.append(row)
                continue
            finished.append(row.request)
            if self._may_be_found(row):
                # The last token was drawn but never fed.
                known = (row.request.prompt_ids + row.request.token_ids)[:-1]
                self._pool.release_known(known, row.pages)
            else:
                self._pool.release(row.pages)
        self.active = staying
        return finished

    def _pages_needed(self, row: Row, steps: int) -> int:
        """Pages to add so that `steps` more tokens can be fed after those it has."""
        whole = -(-row.limit // PAGE_SIZE) - len(row.pages)
        if self._pool.available - whole >= self._spare:  # plenty: all it may ever need at once
            return max(0, whole)
        reach = min(row.request.length + steps, row.limit)
        return max(0, -(-reach // PAGE_SIZE) - len(row.pages))

    def _preempt(self, row: Row) -> None:
        """Send a sequence back to wait: it keeps its tokens and is computed again from them."""
        self._pool.release(row.pages)
        self._waiting.append(row.request)  # in front: the older one, preempted after it, goes first
        self.preempted += 1

    def _row(self, request: Request, found: list[int]) -> Row:
        sampling = request.sampling
        ends = [] if sampling.ignore_eos else sorted(self._rules.eos_ids)
        stops = list(dict.fromkeys([*ends, *sampling.stop_token_ids]))
        careful = bool(sampling.stop) or len(stops) > MAX_STOPS
        return Row(request, list(found), stops, careful, len(found) * PAGE_SIZE, self._weights)


def _precedence(request: Request) -> float:
    """The greatest starts first; only a preempted request waits with tokens of its own."""
    return math.inf if request.token_ids else request.sampling.max_tokens
