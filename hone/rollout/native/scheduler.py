"""The scheduler: decides which requests wait, which sequences run, and which are preempted.

The scheduler runs on the host and uses no tensors. paged_core.py computes the scheduled sequences;
paged_cache.py manages blocks and the prefix cache.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hone.rollout.contract import RolloutError, StopReason
from hone.rollout.native.decode_step import MAX_STOP_IDS
from hone.rollout.native.paged_cache import BlockPool
from hone.rollout.requests import Request, RequestRules, WaitingRequests, select

BLOCK_SIZE = 16
STEPS_PER_CHUNK = 32
"""Decode steps between two reads by the host: enough to hide the cost of a read, and few enough that
a waiting request is admitted soon."""
STEPS_PER_LONG_CHUNK = 64
"""Decode steps between two reads by the host when no request waits."""


@dataclass
class RunningSequence:
    """A request that has cache blocks, and so is decoded in every step."""

    request: Request
    blocks: list[int]
    """The block table of the sequence."""
    stop_ids: list[int]
    host_checks_stop: bool
    """Whether the host must check the stop conditions (stop strings, or too many stop tokens for the GPU)."""
    cached_tokens: int = 0
    """Number of tokens that hit the prefix cache."""
    weights_id: int = 0
    """Identifies the weights that computed the first keys; see `Scheduler.clear_prefix_cache`."""

    @property
    def max_length(self) -> int:
        """The maximum length of prompt and response."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


@dataclass(frozen=True)
class PagedRules(RequestRules):
    """`RequestRules` that also limit a sequence to `max_model_len` and to the number of blocks."""

    max_model_len: int = field(kw_only=True)
    num_blocks: int = field(kw_only=True)

    def check(self, request: Request) -> None:
        super().check(request)
        max_length = len(request.prompt_ids) + request.sampling.max_tokens
        if max_length > self.max_model_len:
            raise RolloutError(
                f"request {request.request_id} may reach {max_length} tokens, but the engine was "
                f"built for {self.max_model_len}; raise rollout.max_model_len"
            )
        if -(-max_length // BLOCK_SIZE) >= self.num_blocks:
            raise RolloutError(
                f"request {request.request_id} may reach {max_length} tokens, more than the whole "
                f"cache of {self.num_blocks} blocks of {BLOCK_SIZE}; raise "
                "rollout.gpu_memory_utilization"
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
        """Number of free blocks that running sequences may need in the next decode chunk.

        A sequence gets the blocks of its maximum length at once if at least this number stays free.
        """
        self._waiting = WaitingRequests()
        self.running: list[RunningSequence] = []
        self._weights_id = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self.running)

    def add(self, request: Request) -> None:
        self._rules.check(request)
        request.num_preempted = 0
        self._waiting.add(request)

    def abort(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """Aborts the requests with these ids (None: all); they keep the tokens sampled so far."""
        running = select((sequence.request for sequence in self.running), request_ids)
        for request in running:
            request.stop_reason = StopReason.ABORT
        for sequence in self.running:
            if sequence.request.stop_reason is not None:
                self._pool.release(sequence.blocks)
        self.running = [s for s in self.running if s.request.stop_reason is None]
        return [*running, *self._waiting.abort(request_ids)]

    def chunk_steps(self, unread_tokens: int = 0) -> int:
        """Returns the number of steps of the next decode chunk, limited by the longest remaining response.

        `unread_tokens` is the number of sampled tokens per sequence that the host has not read.
        """
        max_steps = STEPS_PER_CHUNK if self._waiting else STEPS_PER_LONG_CHUNK
        remaining = [s.max_length - s.request.length - unread_tokens for s in self.running]
        return max(1 - unread_tokens, min(max_steps, max(remaining, default=max_steps)))

    def lookahead_steps(self, counts: Sequence[int]) -> int:
        """Returns how many decode steps may run before the host appends `counts[i]` tokens to sequence i.

        Returns 0 if a request waits, if the host must check whether a sequence ends, or if a
        sequence may need another block.
        """
        if self._waiting:
            return 0
        remaining = 0
        for sequence, count in zip(self.running, counts, strict=True):
            has_all_blocks = len(sequence.blocks) * BLOCK_SIZE >= sequence.max_length
            if sequence.host_checks_stop or sequence.request.cancelled or not has_all_blocks:
                return 0
            remaining = max(remaining, sequence.max_length - sequence.request.length - count)
        return min(STEPS_PER_LONG_CHUNK, remaining)

    def extend_block_tables(self, steps: int) -> None:
        """Allocates blocks for the next decode chunk; if they run out, preempts the sequences that would
        start last."""
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            count = self._blocks_needed(sequence, steps)
            if count <= self._pool.num_available:
                sequence.blocks += self._pool.allocate(count)
                index += 1
            else:
                last = max(range(len(self.running)), key=self._start_key)
                sequence = self.running.pop(last)
                self._park(sequence)
                sequence.request.num_preempted = (sequence.request.num_preempted or 0) + 1
                index -= last < index

    def _start_key(self, index: int) -> tuple[int, ...]:
        return self.running[index].request.start_key

    def admit(self, steps: int) -> list[RunningSequence]:
        """Starts waiting requests that fit the batch, the prefill budget, and the free blocks.

        The blocks of a new sequence must suffice for `steps` decode steps after the prefill.
        The requests of a group share the full blocks of their prompt, which is prefilled once.
        """
        self._waiting.end_batch()
        admitted: list[RunningSequence] = []
        first_by_prompt: dict[tuple[int, ...], RunningSequence] = {}
        batched_tokens = 0
        while self._waiting and len(self.running) + len(admitted) < self._max_num_seqs:
            request = self._waiting.first
            ids = tuple(request.all_ids)
            if ids in first_by_prompt:
                prefix_blocks, new_tokens = first_by_prompt[ids].blocks[: len(ids) // BLOCK_SIZE], 0
            else:
                prefix_blocks = self._pool.match_prefix(ids) if self._prefix_caching else []
                new_tokens = len(ids) - len(prefix_blocks) * BLOCK_SIZE
            if admitted and batched_tokens + new_tokens > self._max_num_batched_tokens:
                break
            sequence = self._allocate(request, prefix_blocks, steps + 1)
            if sequence is None:
                if not admitted and not self.running:
                    raise RolloutError(
                        f"request {request.request_id} does not fit the empty cache; "
                        "this is a defect"
                    )
                break
            if not request.token_ids:  # the request was never preempted
                request.cached_tokens = sequence.cached_tokens
            first_by_prompt.setdefault(ids, sequence)
            batched_tokens += new_tokens
            admitted.append(sequence)
            self._waiting.pop()
        self.running += admitted
        return admitted

    def _allocate(
        self, request: Request, prefix_blocks: list[int], steps: int
    ) -> RunningSequence | None:
        """Returns a sequence with its cached prefix and new blocks; None if too few blocks are free."""
        sampling = request.sampling
        eos_ids = [] if sampling.ignore_eos else sorted(self._rules.eos_ids)
        stop_ids = list(dict.fromkeys([*eos_ids, *sampling.stop_token_ids]))
        sequence = RunningSequence(
            request,
            list(prefix_blocks),
            stop_ids,
            host_checks_stop=bool(sampling.stop) or len(stop_ids) > MAX_STOP_IDS,
            cached_tokens=len(prefix_blocks) * BLOCK_SIZE,
            weights_id=self._weights_id,
        )
        self._pool.acquire(prefix_blocks)
        count = self._blocks_needed(sequence, steps)
        if count > self._pool.num_available:
            self._pool.release(prefix_blocks)
            return None
        sequence.blocks += self._pool.allocate(count)
        return sequence

    def clear_prefix_cache(self) -> None:
        """Clears the prefix cache; blocks of sequences that run now will not be inserted."""
        self._weights_id += 1
        self._pool.clear_prefix_cache()

    def insert_prefix(self, sequence: RunningSequence, tokens: Sequence[int]) -> None:
        """Inserts the full blocks of the sequence's prompt `tokens` into the prefix cache."""
        if self._is_cacheable(sequence):
            self._pool.insert(tokens, sequence.blocks)

    def _is_cacheable(self, sequence: RunningSequence) -> bool:
        return self._prefix_caching and sequence.weights_id == self._weights_id

    def remove_finished(self) -> list[Request]:
        """Removes the finished sequences and returns their requests.

        Their blocks stay in the prefix cache until they are evicted.
        """
        finished = [s for s in self.running if s.request.stop_reason is not None]
        for sequence in finished:
            if self._is_cacheable(sequence):
                # The last token was sampled, but its key was not computed.
                self._pool.insert_and_release(sequence.request.all_ids[:-1], sequence.blocks)
            else:
                self._pool.release(sequence.blocks)
        self.running = [s for s in self.running if s.request.stop_reason is None]
        return [sequence.request for sequence in finished]

    def _blocks_needed(self, sequence: RunningSequence, steps: int) -> int:
        """Returns how many blocks to add: for the maximum length if enough are free, else for `steps`."""
        blocks_to_max_length = -(-sequence.max_length // BLOCK_SIZE) - len(sequence.blocks)
        if self._pool.num_available - blocks_to_max_length >= self._watermark:
            return max(0, blocks_to_max_length)
        end = min(sequence.request.length + steps, sequence.max_length)
        return max(0, -(-end // BLOCK_SIZE) - len(sequence.blocks))

    def park(self) -> None:
        """Releases the blocks of all sequences; their requests wait to be prefilled again."""
        for sequence in self.running:
            self._park(sequence)
        self.running = []

    def _park(self, sequence: RunningSequence) -> None:
        self._pool.release(sequence.blocks)
        self._waiting.put_back(sequence.request)
