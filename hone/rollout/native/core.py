"""The core of the native engine on a CPU: a step admits requests and samples a token per sequence.

One forward computes new prompts and running sequences together. Sequence i has slot i, a contiguous part
of the cache, instead of blocks: attention reads a slot as a view, while a block table would need a copy
of all keys at every step. When a sequence finishes, the last sequence moves into its slot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.models.decoder_layer import fits_decoder_layer
from hone.models.policy import Layout, PolicyModel
from hone.ops.attention import (
    AttentionOptions,
    Padding,
    as_bias,
    is_visible,
    padded_attention,
    repeat_heads,
    soft_cap,
    softmax_with_sinks,
)
from hone.ops.packed_linear import row_multiple
from hone.ops.rows import first_equal_indices
from hone.rollout.contract import StopReason
from hone.rollout.native.decoder import ModuleDecoder, PrepackedDecoder
from hone.rollout.native.paged_cache import zeros
from hone.rollout.native.sampler import SamplingRows, sample_tokens
from hone.rollout.requests import Request, RequestRules, WaitingRequests, select
from hone.tokenizer import Tokenizer

_CAPACITY_MULTIPLE = 64
"""The capacity of a slot is a multiple of this many tokens, so that allocations are rare."""
_KEY_MULTIPLE = 16
"""Attention reads a multiple of this many keys, so that the summation order does not depend on
the batch."""
_MIN_BMM_MULTIPLICATIONS = 400
"""For products with fewer multiplications, torch.bmm uses another kernel, which rounds differently."""


class SlotCache:
    """The keys and values of up to `num_slots` sequences."""

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self._num_layers, self._num_slots = num_layers, num_slots
        self.free()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for kv in self._kv for tensor in kv)

    def free(self) -> None:
        """Frees the memory; the next sequence allocates it again."""
        self._capacity = 0
        self._kv: list[list[Tensor]] = [[] for _ in range(self._num_layers)]
        """Keys and values per layer, [slots, KV, capacity, D]; no tensors before the first tokens."""

    def reserve(self, num_tokens: int, num_used_slots: int) -> None:
        """Grows the slots to at least `num_tokens` tokens; the contents of used slots are copied."""
        if num_tokens <= self._capacity:
            return
        self._capacity = _round_up(max(num_tokens, self._capacity * 3 // 2), _CAPACITY_MULTIPLE)
        for kv in self._kv:
            for i, old in enumerate(kv):
                kv[i] = zeros((*old.shape[:2], self._capacity, old.shape[3]), old.dtype, old.device)
                kv[i][:num_used_slots, :, : old.shape[2]] = old[:num_used_slots]

    def layer(self, index: int, new_keys: Tensor) -> list[Tensor]:
        """Returns keys and values of one layer; the first `new_keys` [N, KV, D] allocate them."""
        if not self._kv[index]:
            shape = (self._num_slots, new_keys.shape[1], self._capacity, new_keys.shape[2])
            self._kv[index] = [zeros(shape, new_keys.dtype, new_keys.device) for _ in "kv"]
        return self._kv[index]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of one slot into another."""
        for kv in self._kv:
            for tensor in kv:
                tensor[target, :, :length] = tensor[source, :, :length]


class PrefillLayout:
    """The layout of whole prompts that are prefilled into empty slots."""

    def __init__(self, cache: SlotCache, slots: list[int], lengths: list[int]) -> None:
        self._cache, self._slots = cache, torch.tensor(slots)
        # Lengths are padded, because a partly filled vector register is summed in another order.
        self._padding = Padding.of(lengths, torch.device("cpu"), multiple=_KEY_MULTIPLE)
        self._padded_length = self._padding.cells.shape[1]
        self._token_slots = self._slots.repeat_interleave(torch.tensor(lengths))  # [N]
        self.positions = self._padding.cell_indices % self._padded_length  # [N]
        self._biases: dict[int, Tensor] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        for new_kv, cached in zip((k, v), self._cache.layer(options.layer, k), strict=True):
            if self._padding.has_equal_lengths:
                padded_rows = self._padding.pad(new_kv)
                cached[:, :, : self._padded_length].index_copy_(0, self._slots, padded_rows)
            else:
                cached[self._token_slots, :, self.positions] = new_kv
        k, v = repeat_heads(q, k, v)
        q, k, v = (self._padding.pad(x) for x in (q, k, v))
        out = padded_attention(q, k, v, self._bias(options.window, q.dtype), options)
        return self._padding.unpad(out)

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:  # [L, L]
        if window is None:
            return None
        if window not in self._biases:
            position = torch.arange(self._padded_length)
            visible = is_visible(position[:, None] - position, window)
            self._biases[window] = as_bias(visible, dtype)
        return self._biases[window]


class DecodeLayout:
    """The layout of one new token in each of the first `len(positions)` slots."""

    def __init__(self, cache: SlotCache, positions: Tensor) -> None:
        self._cache = cache
        self.positions = positions
        self._max_length = int(positions.max()) + 1
        self._num_keys = 0  # keys that attention reads per slot
        self._biases: dict[int | None, Tensor] = {}
        # [rows · KV] indices of the new keys in the cache viewed as [slots · KV · capacity, D]
        self._write_indices: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        rows, kv_heads, head_dim = k.shape
        keys, values = self._cache.layer(options.layer, k)
        if self._write_indices is None:
            multiple = _round_up(_MIN_BMM_MULTIPLICATIONS // head_dim + 1, _KEY_MULTIPLE)
            self._num_keys = min(_round_up(self._max_length, multiple), keys.shape[2])
            slot_head = torch.arange(rows * kv_heads).view(rows, kv_heads)
            self._write_indices = (slot_head * keys.shape[2] + self.positions[:, None]).flatten()
        keys.view(-1, head_dim).index_copy_(0, self._write_indices, k.reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, self._write_indices, v.reshape(-1, head_dim))
        if options.window not in self._biases:
            distance = self.positions[:, None] - torch.arange(self._num_keys)
            bias = as_bias(is_visible(distance, options.window), q.dtype)
            # [rows · KV, 1, num_keys]
            self._biases[options.window] = bias.repeat_interleave(kv_heads, 0)[:, None]
        # Queries that share a key head form the query dimension, so keys are not repeated. With few
        # queries, two batched products are twice as fast as torch's fused attention.
        queries = (q * options.scaling).reshape(rows * kv_heads, -1, head_dim)
        keys, values = (x[:rows, :, : self._num_keys].flatten(0, 1) for x in (keys, values))
        scores = soft_cap(torch.bmm(queries, keys.transpose(1, 2)), options.softcap)
        scores.add_(self._biases[options.window])
        sinks = options.sinks
        if sinks is not None:
            sinks = sinks.view(kv_heads, -1, 1).repeat(rows, 1, 1)
        return torch.bmm(softmax_with_sinks(scores, sinks), values).view(q.shape)


class JointLayout:
    """The layout of a batch of one token per running sequence, then whole new prompts, then padding."""

    def __init__(self, decode: DecodeLayout | None, prefill: PrefillLayout | None) -> None:
        self._layouts = [layout for layout in (decode, prefill) if layout is not None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        outputs, begin = [], 0
        for layout in self._layouts:
            end = begin + len(layout.positions)
            outputs.append(layout.attend(q[begin:end], k[begin:end], v[begin:end], options))
            begin = end
        if begin < len(q):
            outputs.append(q.new_zeros(len(q) - begin, *q.shape[1:]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


class NativeCore:
    """Decodes with continuous batching, the policy's parameters and a slot cache."""

    def __init__(
        self,
        policy: PolicyModel,
        *,
        eos_ids: Sequence[int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        tokenizer: Tokenizer | None = None,
        forward: PrepackedDecoder | ModuleDecoder | None = None,
    ) -> None:
        """`forward` replaces the default forward of the policy."""
        config = policy.lm.config
        self.policy = policy
        self.rules = RequestRules.of(config, eos_ids, tokenizer)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        if forward is None:
            forward = (
                PrepackedDecoder(policy) if fits_decoder_layer(policy) else ModuleDecoder(policy)
            )
        self._forward = forward
        self._forward_is_current = False  # whether the forward has read the current parameters
        prepacked = isinstance(self._forward, PrepackedDecoder)
        self.row_multiple = row_multiple(policy.parameters(), prepacked=prepacked)
        """Rows of a forward are padded to this multiple."""
        self.cache = SlotCache(config.get_text_config().num_hidden_layers, max_num_seqs)
        self.version = 0
        self.prefilled_tokens = 0
        """Prompt tokens computed so far; the shared prompt of a group counts once."""
        self._waiting = WaitingRequests()
        self._running: list[Request] = []
        self._sampling: SamplingRows | None = None  # None after the running requests have changed

    def add(self, request: Request) -> None:
        self.rules.check(request)
        self._waiting.add(request)

    def free_cache(self) -> None:
        self.cache.free()

    def invalidate(self) -> None:
        """Drops everything that was computed from the old parameters."""
        self._forward.invalidate()
        self._forward_is_current = False

    def park(self) -> None:
        for request in self._running:
            self._waiting.put_back(request)
        self._running, self._sampling = [], None

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @torch.inference_mode()
    def abort(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """Aborts the requests with these ids (None: all); they keep the tokens sampled so far."""
        for request in select(self._running, request_ids):
            request.stop_reason = StopReason.ABORT
        return [*self._remove_finished(), *self._waiting.abort(request_ids)]

    @torch.inference_mode()
    def step(self, should_return: Callable[[], bool] = lambda: True) -> list[Request]:
        """Admits requests, samples one token per sequence, and returns the finished requests.

        `should_return`, with which the paged core may stop a step of several tokens, is not called.
        """
        admitted = self._admit()
        logits = self._next_logits(admitted)
        if admitted:
            self._running += admitted
            self._sampling = None
        self._sample(logits)
        return self._remove_finished()

    def _admit(self) -> list[Request]:
        """Removes and returns waiting requests that fit the free slots and the prefill budget."""
        self._waiting.end_batch()
        admitted: list[Request] = []
        prompts: set[tuple[int, ...]] = set()
        batched_tokens = 0
        while self._waiting and len(self._running) + len(admitted) < self._max_num_seqs:
            prompt = tuple(self._waiting.first.all_ids)
            batched_tokens += 0 if prompt in prompts else len(prompt)
            if admitted and batched_tokens > self._max_num_batched_tokens:
                break
            prompts.add(prompt)
            admitted.append(self._waiting.pop())
        return admitted

    def _next_logits(self, admitted: list[Request]) -> Tensor:  # [sequences, V]
        """Returns next-token logits of the running sequences, then of the admitted ones.

        Each distinct prompt, with the tokens of a parked request, is computed once, in the slot of the first
        request that has it.
        """
        if not self._forward_is_current or admitted:
            self._forward.refresh()
            self._forward_is_current = True
        ids, num_running = [r.token_ids[-1] for r in self._running], len(self._running)
        if not admitted:
            return self._logits(self._hidden_states(ids, *self._layout([], []))[:num_running])
        prompts = [tuple(r.all_ids) for r in admitted]
        first_indices = first_equal_indices(prompts)
        distinct_indices = sorted(set(first_indices))
        lengths = [len(prompts[i]) for i in distinct_indices]
        last_token_indices = [
            *range(num_running),
            *(num_running - 1 + end for end in accumulate(lengths)),
        ]
        ids += [token for i in distinct_indices for token in prompts[i]]
        hidden = self._hidden_states(
            ids, *self._layout([num_running + i for i in distinct_indices], lengths)
        )
        self.prefilled_tokens += sum(lengths)
        for i, first in enumerate(first_indices):
            if first != i:
                self.cache.copy(num_running + first, num_running + i, len(prompts[i]))
        row_by_first_index = {first: num_running + i for i, first in enumerate(distinct_indices)}
        rows = [*range(num_running), *(row_by_first_index[first] for first in first_indices)]
        logits = self._logits(hidden[torch.tensor(last_token_indices)])
        return logits if len(rows) == len(logits) else logits[torch.tensor(rows)]

    def _layout(self, slots: list[int], lengths: list[int]) -> tuple[Tensor, Layout]:
        """Returns positions and layout: the running sequences, then the new prompts in `slots`."""
        running_positions = torch.tensor([r.length - 1 for r in self._running], dtype=torch.int64)
        self.cache.reserve(max([*lengths, *(r.length for r in self._running)]), len(self._running))
        decode = DecodeLayout(self.cache, running_positions) if self._running else None
        if decode is not None and not slots and len(running_positions) % self.row_multiple == 0:
            return running_positions, decode
        prefill = PrefillLayout(self.cache, slots, lengths) if slots else None
        positions = (
            torch.cat([running_positions, prefill.positions]) if prefill else running_positions
        )
        return positions, JointLayout(decode, prefill)

    def _hidden_states(self, ids: list[int], positions: Tensor, layout: Layout) -> Tensor:
        padding = -len(ids) % self.row_multiple
        if padding:
            positions = F.pad(positions, (0, padding))
        return self._forward(torch.tensor(ids + [0] * padding), positions, layout)

    def _logits(self, hidden: Tensor) -> Tensor:
        rows = len(hidden)
        if padding := -rows % self.row_multiple:
            hidden = F.pad(hidden, (0, 0, 0, padding))
        return self._forward.logits(hidden)[:rows]

    def _sample(self, logits: Tensor) -> None:
        requests = self._running
        if self._sampling is None:
            self._sampling = SamplingRows.of([r.sampling for r in requests], logits.device)
        positions = torch.tensor([r.length for r in requests])
        tokens, log_probs = sample_tokens(logits, positions, self._sampling)
        for request, token, log_prob in zip(
            requests, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            request.append(token, log_prob, self.version)
            request.stop_reason = self.rules.stop_reason(request)

    def _remove_finished(self) -> list[Request]:
        """Removes and returns the finished requests; the last sequences move into their slots."""
        finished = [r for r in self._running if r.stop_reason is not None]
        if not finished:
            return []
        slot = 0
        while slot < len(self._running):
            if self._running[slot].stop_reason is None:
                slot += 1
                continue
            last = self._running.pop()
            if slot < len(self._running):
                if last.stop_reason is None:
                    self.cache.copy(len(self._running), slot, last.length)
                self._running[slot] = last
        self._sampling = None
        return finished
