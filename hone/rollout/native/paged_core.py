"""The core of the native engine on a GPU: a step admits requests and runs a chunk of decode steps.

scheduler.py decides which sequences run. A decode chunk is several decode steps, after which the host
reads all sampled tokens at once; within a chunk, the device moves each row to its next position. CPU
tests run this core with the reference kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hone.models.decoder_layer import fits_decoder_layer
from hone.models.policy import PolicyModel
from hone.ops.rows import first_equal_indices
from hone.protocol.rows import to_device
from hone.rollout.native.decode_step import BatchState, DecodeStep, graph_sizes
from hone.rollout.native.decoder import (
    ExpertCache,
    FusedDecoder,
    ModuleDecoder,
    RecordingDecoder,
    can_join_parameters,
)
from hone.rollout.native.exact_decoder import ExactDecoder
from hone.rollout.native.kernels_reference import kernels_for
from hone.rollout.native.paged_cache import PagedCache
from hone.rollout.native.paged_layouts import ExactLayout, PagedDecode, PagedPrefill
from hone.rollout.native.sampler import TruncatedSampling
from hone.rollout.native.scheduler import (
    BLOCK_SIZE,
    STEPS_PER_LONG_CHUNK,
    PagedRules,
    RunningSequence,
    Scheduler,
)
from hone.rollout.requests import Request, RequestRules
from hone.tokenizer import Tokenizer


class _DecodeChunk(NamedTuple):
    """The tokens of a decode chunk, which the host has read but not yet appended to their requests."""

    tokens: Tensor  # [sequences, C]; the first counts[i] of row i are valid
    log_probs: Tensor  # [sequences, C]
    counts: list[int]  # number of tokens per sequence
    finished: list[int]  # 1 if the sequence has finished, else 0


class PagedCore:
    """Decodes with continuous batching, the policy's parameters and a paged key-value cache."""

    def __init__(
        self,
        policy: PolicyModel,
        *,
        eos_ids: Sequence[int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        gpu_memory_utilization: float,
        tokenizer: Tokenizer | None = None,
        enforce_eager: bool = False,
        capture_sizes: Sequence[int] | None = None,
        prefix_caching: bool = True,
        blocks: int | None = None,
        exact: ExactDecoder | None = None,
        record_experts: bool = False,
        forward: FusedDecoder | ModuleDecoder | None = None,
    ) -> None:
        """`blocks` is the number of cache blocks (None: as many as fit); `forward` replaces the default."""
        self.device = next(policy.parameters()).device
        self.policy = policy
        self._exact = exact
        self.version = 0
        self._kernels = exact.kernels if exact is not None else kernels_for(self.device)
        max_blocks_per_seq = -(-max_model_len // BLOCK_SIZE)
        self.cache = PagedCache.for_policy(
            policy,
            num_blocks=blocks,
            max_blocks=max_num_seqs * (max_blocks_per_seq + STEPS_PER_LONG_CHUNK // BLOCK_SIZE + 1)
            + 1,
            block_size=BLOCK_SIZE,
            memory_fraction=gpu_memory_utilization,
        )
        rules = vars(RequestRules.of(policy.lm.config, eos_ids, tokenizer))
        num_blocks = self.cache.num_blocks
        self.rules = PagedRules(**rules, max_model_len=max_model_len, num_blocks=num_blocks)
        self._scheduler = Scheduler(
            self.cache.pool,
            self.rules,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefix_caching=prefix_caching,
        )
        self._expert_cache: ExpertCache | None = None
        if record_experts:
            routing = policy.enable_routing()
            self._expert_cache = ExpertCache(routing, num_blocks, BLOCK_SIZE, self.device)
        self._forward = forward if forward is not None else self._build_forward(max_model_len)
        self._logits = exact.logits if exact is not None else policy.logits
        self._max_num_seqs = max_num_seqs
        empty_rows = partial(BatchState.empty, max_num_seqs, max_blocks_per_seq)
        self._device_rows = empty_rows(STEPS_PER_LONG_CHUNK + 1, self.device)
        self._host_rows = empty_rows(0, torch.device("cpu"))
        self._device_row_keys: list[tuple[int, int]] = []  # `_row_keys` of the device rows
        self._addresses: list[int] = []  # parameter addresses that captured graphs read
        self._must_refresh = True
        sizes = graph_sizes(max_num_seqs, capture_sizes)
        self._decode_step = self._new_decode_step(sizes, enforce_eager)
        self.prefilled_tokens = 0
        """Prompt tokens computed so far; the shared prompt of a group counts once."""

    def _new_decode_step(self, batch_sizes: Sequence[int], enforce_eager: bool) -> DecodeStep:
        return DecodeStep(
            self._forward,
            self._logits,
            self._decode_layout,
            self._device_rows,
            self._kernels,
            block_size=BLOCK_SIZE,
            batch_sizes=batch_sizes,
            use_graphs=self.device.type == "cuda" and not enforce_eager,
            may_synchronize=isinstance(self._forward, ModuleDecoder),
        )

    def _build_forward(self, max_model_len: int) -> ExactDecoder | FusedDecoder | ModuleDecoder:
        if self._expert_cache is not None:
            return RecordingDecoder(self.policy, self._expert_cache)
        if self._exact is not None:
            self._exact.extend_rotary_table(max_model_len)
            return self._exact
        if fits_decoder_layer(self.policy) and can_join_parameters(self.policy):
            return FusedDecoder(self.policy, self._kernels, max_model_len)
        return ModuleDecoder(self.policy)

    # -- methods that engine.py calls ----------------------------------------------------------

    def free_cache(self) -> None:
        self.cache.free()

    def invalidate(self) -> None:
        """Clears the prefix cache; the next step reads the parameters again."""
        self._scheduler.clear_prefix_cache()
        self._must_refresh = True

    def park(self) -> None:
        if self._expert_cache is not None:
            self._read_experts(None)
        self._scheduler.park()

    def add(self, request: Request) -> None:
        self._scheduler.add(request)

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    def abort(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """Aborts the requests with these ids (None: all); they keep the tokens sampled so far."""
        self._device_row_keys = []
        if self._expert_cache is not None:
            self._read_experts(request_ids)
        return self._scheduler.abort(request_ids)

    @torch.no_grad()
    def step(self, should_return: Callable[[], bool] = lambda: True) -> list[Request]:
        """Runs a decode chunk, admits requests, and returns the finished requests.

        The host prepares prefills while the device computes the chunk of the running sequences. Then further
        chunks run until a sequence finishes, `should_return()` is True, or `Scheduler.lookahead_steps` is 0.
        The host appends the tokens of one chunk while the device samples the next.
        """
        self.cache.reserve()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a new thread uses device 0
        scheduler = self._scheduler
        if self._must_refresh or not scheduler.running:
            self._refresh_forward()
            self._must_refresh = False
        steps = scheduler.chunk_steps()
        scheduler.extend_block_tables(steps)
        self._update_rows()
        num_running = len(scheduler.running)
        if num_running:
            self._decode(steps)
        while admitted := scheduler.admit(steps):
            self._prefill(admitted)
        if not num_running:
            # The prefill has sampled one token that the host has not read; blocks suffice for `steps` more.
            self._decode(min(steps, scheduler.chunk_steps(unread_tokens=1)))
        chunk = self._read_chunk()
        while not (any(chunk.finished) or should_return()):
            lookahead = scheduler.lookahead_steps(chunk.counts)
            if not lookahead:
                break
            self._device_rows.num_sampled.zero_()
            self._decode(lookahead)
            self._append_chunk(chunk)
            chunk = self._read_chunk()
        self._append_chunk(chunk)
        return self._remove_finished()

    def _refresh_forward(self) -> None:
        """Reads changed parameters again; discards the CUDA graphs if parameter addresses have changed."""
        self._forward.refresh()
        addresses = self.policy.addresses()
        if addresses != self._addresses:
            self._addresses = addresses
            self._decode_step.discard_graphs()

    # -- computing -----------------------------------------------------------------------------

    def _update_rows(self) -> None:
        """Copies the running sequences to the device rows, unless the rows are up to date.

        All other rows are cleared, even if no sequence runs: a decode step computes some of them as padding,
        and a stale row would write to blocks that other sequences now own.
        """
        running = self._scheduler.running
        if running and self._device_row_keys == _row_keys(running):
            self._device_rows.num_sampled.zero_()
            return
        self._fill_host_rows(0, running)
        self._host_rows.clear_from(len(running))
        self._host_rows.copy_to(self._device_rows, 0, self._max_num_seqs)

    def _fill_host_rows(self, begin: int, sequences: list[RunningSequence]) -> None:
        states = []
        for sequence in sequences:
            request, position = sequence.request, sequence.request.length - 1
            token = request.token_ids[-1] if request.token_ids else request.prompt_ids[-1]
            slot = sequence.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            states.append((token, position, slot, request.sampling.seed, sequence.max_length, 0, 0))
        self._host_rows.fill(
            begin,
            states,
            temperatures=[s.request.sampling.temperature for s in sequences],
            stop_ids=[s.stop_ids for s in sequences],
            blocks=[s.blocks for s in sequences],
        )

    def _prefill(self, admitted: list[RunningSequence]) -> None:
        """Computes each distinct prompt once and samples a token for every admitted sequence.

        The partial last block of a prompt is copied for every other request of the prompt.
        """
        prompts = [tuple(s.request.all_ids) for s in admitted]
        first_indices = first_equal_indices(prompts)
        distinct_indices = sorted(set(first_indices))
        sources, targets = [], []  # blocks to copy
        for i, first in enumerate(first_indices):
            last_block, tail_tokens = divmod(len(prompts[i]), BLOCK_SIZE)
            if first != i and tail_tokens:
                sources.append(admitted[first].blocks[last_block])
                targets.append(admitted[i].blocks[last_block])
        hidden = self._prefill_hidden_states(
            [admitted[i] for i in distinct_indices], [prompts[i] for i in distinct_indices]
        )
        self.cache.copy_blocks(sources, targets)
        if self._expert_cache is not None:
            self._expert_cache.copy_blocks(sources, targets)
        end = len(self._scheduler.running)
        begin = end - len(admitted)
        self._fill_host_rows(begin, admitted)
        self._host_rows.copy_to(self._device_rows, begin, end)
        row_by_first_index = {first: i for i, first in enumerate(distinct_indices)}
        rows = torch.tensor([row_by_first_index[first] for first in first_indices])
        logits = self._logits(hidden[to_device(rows, self.device)])
        self._sample(logits, self._truncated_sampling(admitted), begin, end)
        for i in distinct_indices:
            self._scheduler.insert_prefix(admitted[i], prompts[i])

    def _prefill_hidden_states(
        self, sequences: list[RunningSequence], prompts: list[tuple[int, ...]]
    ) -> Tensor:
        """Returns hidden states [prompts, d] of the last token of each prompt."""
        starts = [s.cached_tokens for s in sequences]
        lengths = [len(ids) - start for ids, start in zip(prompts, starts, strict=True)]
        blocks = [s.blocks for s in sequences]
        layout: ExactLayout | PagedPrefill
        if self._exact is not None:
            layout = self._exact.prefill_layout(self.cache, blocks, starts, lengths)
        else:
            layout = PagedPrefill(self.cache, self._kernels, blocks, starts, lengths, self.device)
        ids: list[int] = []
        for prompt, start in zip(prompts, starts, strict=True):
            ids += prompt[start:]
        inputs = to_device(torch.from_numpy(np.array(ids, np.int64)), self.device)
        forward: Callable[..., Tensor] = self._forward  # layout types differ
        hidden = forward(inputs, layout.positions, layout)
        self.prefilled_tokens += len(ids)
        last_token_indices = torch.tensor(lengths).cumsum(0) - 1
        return hidden[to_device(last_token_indices, self.device)]

    def _sample(
        self, logits: Tensor, truncated_sampling: TruncatedSampling | None, begin: int, end: int
    ) -> None:
        batch = self._device_rows.rows(begin, end)
        if truncated_sampling is None:
            self._kernels.sample(logits, batch, BLOCK_SIZE)
        else:
            truncated_sampling.sample(logits[: end - begin], batch, self._kernels, BLOCK_SIZE)

    def _truncated_sampling(self, sequences: list[RunningSequence]) -> TruncatedSampling | None:
        sampling = [s.request.sampling for s in sequences]
        return TruncatedSampling.of(sampling, self.device, exact=self._exact is not None)

    def _decode_layout(self, batch: BatchState) -> ExactLayout | PagedDecode:
        if self._exact is not None:
            return self._exact.decode_layout(self.cache, batch)
        return PagedDecode(self.cache, self._kernels, batch)

    def _decode(self, steps: int) -> None:
        """Launches `steps` decode steps; the host reads no result."""
        running = self._scheduler.running
        truncated_sampling = self._truncated_sampling(running) if steps else None
        for _ in range(steps):
            logits = self._decode_step.run(len(running), sample=truncated_sampling is None)
            if truncated_sampling is not None:
                self._sample(logits, truncated_sampling, 0, len(running))

    # -- results -------------------------------------------------------------------------------

    def _read_chunk(self) -> _DecodeChunk:
        """Waits for the device; copies the sampled tokens, because the next decode chunk overwrites them."""
        batch = self._device_rows.rows(0, len(self._scheduler.running))
        tokens = batch.tokens_out.to("cpu", copy=True)
        log_probs = batch.log_probs_out.to("cpu", copy=True)
        return _DecodeChunk(tokens, log_probs, batch.num_sampled.tolist(), batch.finished.tolist())

    def _append_chunk(self, chunk: _DecodeChunk) -> None:
        tokens, log_probs = chunk.tokens.tolist(), chunk.log_probs.tolist()
        for index, sequence in enumerate(self._scheduler.running):
            count, finished = chunk.counts[index], bool(chunk.finished[index])
            self._append_tokens(sequence, tokens[index][:count], log_probs[index][:count], finished)

    def _read_experts(self, request_ids: Collection[str] | None = ()) -> None:
        """Copies routed experts to finished requests and to requests with these ids (None: all)."""
        assert self._expert_cache is not None
        for sequence in self._scheduler.running:
            request = sequence.request
            is_requested = request_ids is None or request.request_id in request_ids
            if is_requested or request.stop_reason is not None:
                # The last token was sampled but has not been an input, so it has no experts.
                request.routed_experts = self._expert_cache.read(
                    sequence.blocks, request.length - 1
                )

    def _remove_finished(self) -> list[Request]:
        running = self._scheduler.running
        if self._expert_cache is not None:
            self._read_experts()
        finished = self._scheduler.remove_finished()
        self._device_row_keys = [] if finished else _row_keys(running)
        return finished

    def _append_tokens(
        self, sequence: RunningSequence, tokens: list[int], log_probs: list[float], finished: bool
    ) -> None:
        request = sequence.request
        if not sequence.host_checks_stop:
            request.token_ids += tokens
            request.log_probs += log_probs
            request.versions += [self.version] * len(tokens)
            if finished or request.cancelled:
                request.stop_reason = self.rules.stop_reason(request)
            return
        for token, log_prob in zip(tokens, log_probs, strict=True):
            request.append(token, log_prob, self.version)
            request.stop_reason = self.rules.stop_reason(request)
            if request.stop_reason is not None:
                return


def _row_keys(sequences: list[RunningSequence]) -> list[tuple[int, int]]:
    """Returns a key per sequence; the key changes when the sequence gets blocks."""
    return [(id(sequence), len(sequence.blocks)) for sequence in sequences]
