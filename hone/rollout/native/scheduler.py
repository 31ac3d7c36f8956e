"""The scheduler: which requests wait, which sequences run, and which are preempted.

It is bookkeeping of the host over a pool of blocks and touches no tensor. paged_core.py computes what is
scheduled here; paged_cache.py knows which block holds which tokens.
"""

from __future__ import annotations

import math
from bisect import insort_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hone.rollout.contract import RolloutError, StopReason
from hone.rollout.native.batch_state import MAX_STOPS
from hone.rollout.native.paged_cache import BlockPool
from hone.rollout.requests import Request, RequestRules, select

BLOCK_SIZE = 16
STEPS_PER_CHUNK = 32
"""Decode steps between two reads by the host: enough to hide them, few enough to admit requests soon."""
STEPS_PER_LONG_CHUNK = 64
"""The same where no request waits."""


@dataclass
class RunningSequence:
    """A request that holds blocks."""

    request: Request
    blocks: list[int]
    """Its block table."""
    stops: list[int]
    host_checks_stop: bool
    """The GPU alone does not see its end: it has stop strings, or too many stop tokens."""
    cached_tokens: int = 0
    """Tokens of its prefix-cache hit."""
    weights: int = 0
    """The weights that its first keys were computed with, see `Scheduler.clear_prefix_cache`."""

    @property
    def limit(self) -> int:
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


@dataclass(frozen=True)
class PagedRules(RequestRules):
    """The rules of every engine, and no more tokens than the block tables are wide."""

    longest: int = field(kw_only=True)
    blocks: int = field(kw_only=True)

    def check(self, request: Request) -> None:
        super().check(request)
        reach = len(request.prompt_ids) + request.sampling.max_tokens
        if reach > self.longest:
            raise RolloutError(
                f"request {request.request_id} may reach {reach} tokens, but the engine was built "
                f"for {self.longest}; raise rollout.max_model_len"
            )
        if -(-reach // BLOCK_SIZE) >= self.blocks:
            raise RolloutError(
                f"request {request.request_id} may reach {reach} tokens, more than the whole cache "
                f"of {self.blocks} blocks of {BLOCK_SIZE}; raise rollout.gpu_memory_utilization"
            )


class Scheduler:
    """The waiting requests and the running sequences, which share one pool of blocks."""

    def __init__(
        self,
        pool: BlockPool,
        rules: PagedRules,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool,
    ) -> None:
        self._pool, self._rules = pool, rules
        self._max_num_seqs, self._max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self._prefix_caching = prefix_caching
        self._watermark = max_num_seqs * (STEPS_PER_LONG_CHUNK // BLOCK_SIZE)
        """Blocks that stay free for the next chunk before a sequence may allocate ahead."""
        self._waiting: list[Request] = []  # the last one starts first
        self.running: list[RunningSequence] = []
        self._weights = 0
        self.preempted = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; the longest max_tokens starts first, equals in order of arrival.

        So no long request is left to the end, alone in the batch. Preempted ones start before new ones.
        """
        self._rules.check(request)
        insort_left(self._waiting, request, key=_precedence)

    def abort(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """End these requests (None: all) with the tokens they have."""
        waiting = select(reversed(self._waiting), request_ids)
        running = select((sequence.request for sequence in self.running), request_ids)
        for request in [*running, *waiting]:
            request.stop_reason = StopReason.ABORT
        for sequence in self.running:
            if sequence.request.stop_reason is not None:
                self._pool.release(sequence.blocks)
        self.running = [s for s in self.running if s.request.stop_reason is None]
        self._waiting = [r for r in self._waiting if r.stop_reason is None]
        return [*running, *waiting]

    def chunk_steps(self, drawn: int = 0) -> int:
        """Decode steps until the host reads: no more than the longest sequence still needs.

        `drawn` tokens of every sequence have not been read by the host yet.
        """
        most = STEPS_PER_CHUNK if self._waiting else STEPS_PER_LONG_CHUNK
        left = [s.limit - s.request.length - drawn for s in self.running]
        return max(1 - drawn, min(most, max(left, default=most)))

    def lookahead_steps(self, counts: Sequence[int]) -> int:
        """Steps that may follow before the host has appended these many new tokens per sequence.

        0 where the host must append first: a request waits, or a sequence may end or lack a block.
        """
        if self._waiting:
            return 0
        left = 0
        for sequence, count in zip(self.running, counts, strict=False):  # none after an abort
            allocated = len(sequence.blocks) * BLOCK_SIZE >= sequence.limit
            if sequence.host_checks_stop or sequence.request.cancelled or not allocated:
                return 0
            left = max(left, sequence.limit - sequence.request.length - count)
        return min(STEPS_PER_LONG_CHUNK, left)

    def extend_block_tables(self, steps: int) -> None:
        """Allocate blocks for the next chunk, oldest sequences first; the newest are preempted."""
        at = 0
        while at < len(self.running):
            sequence = self.running[at]
            need = self._blocks_needed(sequence, steps)
            if need <= self._pool.available:
                sequence.blocks += self._pool.allocate(need)
                at += 1
            else:
                self._preempt(self.running.pop())

    def admit(self, steps: int) -> list[RunningSequence]:
        """Start the requests that fit the batch, the blocks and one prefill of distinct prompts.

        The later samples of a group share the full blocks of its first.
        """
        admitted: list[RunningSequence] = []
        leaders: dict[tuple[int, ...], RunningSequence] = {}
        tokens = 0
        while self._waiting and len(self.running) + len(admitted) < self._max_num_seqs:
            request = self._waiting[-1]
            ids = tuple(request.prompt_ids + request.token_ids)
            leader = leaders.get(ids)
            if leader is not None:
                prefix, new = leader.blocks[: len(ids) // BLOCK_SIZE], 0
            else:
                prefix = self._pool.match_prefix(ids) if self._prefix_caching else []
                new = len(ids) - len(prefix) * BLOCK_SIZE
            if admitted and tokens + new > self._max_num_batched_tokens:
                break
            sequence = self._start(request, prefix, steps + 1)
            if sequence is None:
                if not admitted and not self.running:
                    raise RolloutError(
                        f"request {request.request_id} does not fit the empty cache; this is a defect"
                    )
                break
            if not request.token_ids:  # not one that was preempted
                request.cached_tokens = sequence.cached_tokens
            leaders.setdefault(ids, sequence)
            tokens += new
            admitted.append(sequence)
            self._waiting.pop()
        self.running += admitted
        return admitted

    def _start(self, request: Request, prefix: list[int], steps: int) -> RunningSequence | None:
        """The sequence over its cached prefix and new blocks; None where too few are available."""
        sampling = request.sampling
        ends = [] if sampling.ignore_eos else sorted(self._rules.eos_ids)
        stops = list(dict.fromkeys([*ends, *sampling.stop_token_ids]))
        sequence = RunningSequence(
            request,
            list(prefix),
            stops,
            host_checks_stop=bool(sampling.stop) or len(stops) > MAX_STOPS,
            cached_tokens=len(prefix) * BLOCK_SIZE,
            weights=self._weights,
        )
        self._pool.acquire(prefix)
        need = self._blocks_needed(sequence, steps)
        if need > self._pool.available:
            self._pool.release(prefix)
            return None
        sequence.blocks += self._pool.allocate(need)
        return sequence

    def clear_prefix_cache(self) -> None:
        """Forget all prefixes; sequences that run now are not inserted any more."""
        self._weights += 1
        self._pool.clear_prefix_cache()

    def insert_prefix(self, sequence: RunningSequence, tokens: Sequence[int]) -> None:
        """Insert the full blocks of `tokens`, which this sequence computed, into the prefix cache."""
        if self._is_cacheable(sequence):
            self._pool.insert(tokens, sequence.blocks)

    def _is_cacheable(self, sequence: RunningSequence) -> bool:
        return self._prefix_caching and sequence.weights == self._weights

    def retire(self) -> list[Request]:
        """Remove the finished sequences; their blocks stay in the prefix cache until evicted."""
        finished = [s for s in self.running if s.request.stop_reason is not None]
        for sequence in finished:
            if self._is_cacheable(sequence):
                # The last token was drawn but never fed.
                tokens = (sequence.request.prompt_ids + sequence.request.token_ids)[:-1]
                self._pool.release_cached(tokens, sequence.blocks)
            else:
                self._pool.release(sequence.blocks)
        self.running = [s for s in self.running if s.request.stop_reason is None]
        return [sequence.request for sequence in finished]

    def _blocks_needed(self, sequence: RunningSequence, steps: int) -> int:
        """Blocks to add so that `steps` more tokens can be fed."""
        whole = -(-sequence.limit // BLOCK_SIZE) - len(sequence.blocks)
        if self._pool.available - whole >= self._watermark:  # plenty: all it may ever need at once
            return max(0, whole)
        reach = min(sequence.request.length + steps, sequence.limit)
        return max(0, -(-reach // BLOCK_SIZE) - len(sequence.blocks))

    def _preempt(self, sequence: RunningSequence) -> None:
        """Return a sequence to the waiting queue; it keeps its tokens and is recomputed from them."""
        self._pool.release(sequence.blocks)
        self._waiting.append(sequence.request)  # the older one, preempted after it, starts first
        self.preempted += 1


def _precedence(request: Request) -> float:
    """The greatest starts first; only a preempted request waits with tokens of its own."""
    return math.inf if request.token_ids else request.sampling.max_tokens
