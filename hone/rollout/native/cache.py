"""The CPU key-value cache, with one contiguous slot per sequence, and its attention layouts.

Sequence i has slot i, so a decode step reads a view of the cache. When a sequence finishes, the
last sequence moves into its slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
from hone.rollout.native.paged_cache import zeros

_CAPACITY_MULTIPLE = 64
"""The capacity of a slot is a multiple of this many tokens, so that allocations are rare."""
_KEY_MULTIPLE = 16
"""Attention reads a multiple of this many keys, so that the summation order does not depend on
the batch."""
_SMALL_PRODUCT = 400
"""Below this many multiplications, torch rounds a batched product differently."""


class SlotCache:
    """The keys and values of up to `num_slots` sequences."""

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self._num_layers, self._num_slots = num_layers, num_slots
        self.free()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for kv in self._kv for t in kv)

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
        self._padding = Padding.of(lengths, multiple=_KEY_MULTIPLE)
        self._padded_length = self._padding.cells.shape[1]
        self._token_slots = self._slots.repeat_interleave(torch.tensor(lengths))  # [N]
        self.positions = self._padding.cell_indices % self._padded_length  # [N]
        self._biases: dict[int, Tensor] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        for new_kv, cached in zip((k, v), self._cache.layer(options.layer, k), strict=True):
            if self._padding.equal_lengths:
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
        self._flat_indices: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        rows, kv_heads, head_dim = k.shape
        keys, values = self._cache.layer(options.layer, k)
        if self._flat_indices is None:
            multiple = _round_up(_SMALL_PRODUCT // head_dim + 1, _KEY_MULTIPLE)
            self._num_keys = min(_round_up(self._max_length, multiple), keys.shape[2])
            head = torch.arange(rows * kv_heads).view(rows, kv_heads)
            self._flat_indices = (head * keys.shape[2] + self.positions[:, None]).flatten()
        keys.view(-1, head_dim).index_copy_(0, self._flat_indices, k.reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, self._flat_indices, v.reshape(-1, head_dim))
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
    """The layout of a joint batch: one token per running sequence, whole new prompts, padding."""

    def __init__(self, decode: DecodeLayout | None, prefill: PrefillLayout | None) -> None:
        self._layouts = [layout for layout in (decode, prefill) if layout is not None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        parts, begin = [], 0
        for layout in self._layouts:
            end = begin + len(layout.positions)
            parts.append(layout.attend(q[begin:end], k[begin:end], v[begin:end], options))
            begin = end
        if begin < len(q):
            parts.append(q.new_zeros(len(q) - begin, *q.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
