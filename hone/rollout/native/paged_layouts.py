"""Attention over the paged cache, for prefill and decode.

Both layouts first write the new keys and values into the cache. Hugging Face models call `attend`; the fused
decoder calls `attend_qkv` with queries, keys and values as one tensor before the rotation.
"""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from hone.ops.attention import (
    AttentionOptions,
    as_bias,
    fits_varlen,
    is_visible,
    padded_attention,
    repeat_heads,
    varlen_attention,
)
from hone.ops.device import send
from hone.rollout.native.batch_state import BatchState
from hone.rollout.native.kernels_reference import RotaryTable
from hone.rollout.native.paged_cache import PagedCache

_FULL_GPU_PROGRAMS = 512
"""Number of attention programs that occupy a large GPU; the keys of a small batch are split to reach it."""
_MAX_SPLITS = 16


class PagedPrefill:
    """The layout of `lengths[i]` new tokens per sequence i, which follow `starts[i]` cached tokens."""

    def __init__(
        self,
        cache: PagedCache,
        kernels: ModuleType,
        blocks: list[list[int]],
        starts: list[int],
        lengths: list[int],
        device: torch.device,
    ) -> None:
        self._cache, self._kernels = cache, kernels
        block_size = cache.block_size
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        offsets = np.arange(block_size)
        slots = [
            (np.array(ids[: -(-end // block_size)])[:, None] * block_size + offsets).reshape(-1)[
                :end
            ]
            for ids, end in zip(blocks, ends, strict=True)
        ]
        self._position_ranges = list(zip(starts, ends, strict=True))
        self.positions = _concat([np.arange(*r) for r in self._position_ranges], device)
        self.slots = _concat([s[start:] for s, start in zip(slots, starts, strict=True)], device)
        self._key_slots = _concat(slots, device) if any(starts) else None
        self._max_lengths = max(lengths), max(ends)
        self._cu_q, self._cu_k = (
            send(torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
            for n in (lengths, ends)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        self._cache.check_shape(k, v)
        self._kernels.store_kv(k, v, self.slots, self._cache, options.layer)
        return self._attend(q, k, v, options)

    def attend_qkv(self, qkv: Tensor, rotary: RotaryTable, options: AttentionOptions) -> Tensor:
        q, k, v = self._kernels.rope_store(
            qkv, rotary, self.positions, self.slots, self._cache, options.layer, return_keys=True
        )
        return self._attend(q, k, v, options)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        if self._key_slots is not None:  # prefix-cache hits: read all keys from the cache
            block_size = self._cache.block_size
            block, offset = self._key_slots // block_size, self._key_slots % block_size
            k, v = (tensor[block, :, offset] for tensor in self._cache.layer(options.layer))
        if fits_varlen(q) and not options.needs_scores:
            scaling, window = options.scaling, options.window
            return varlen_attention(
                q, k, v, self._cu_q, self._cu_k, *self._max_lengths, scaling=scaling, window=window
            )
        k, v = repeat_heads(q, k, v)
        out = torch.empty_like(q)
        begin_q = begin_k = 0
        for start, end in self._position_ranges:
            q_slice = slice(begin_q, begin_q + end - start)
            k_slice = slice(begin_k, begin_k + end)
            position = torch.arange(end, device=q.device)
            visible = is_visible(position[start:, None] - position, options.window)
            queries, keys, values = (
                x.transpose(0, 1)[None] for x in (q[q_slice], k[k_slice], v[k_slice])
            )
            attention_out = padded_attention(
                queries, keys, values, as_bias(visible, q.dtype), options
            )
            out[q_slice] = attention_out[0].transpose(0, 1)
            begin_q, begin_k = q_slice.stop, k_slice.stop
        return out


def _concat(arrays: list[np.ndarray], device: torch.device) -> Tensor:
    return send(torch.from_numpy(np.concatenate(arrays)), device)


class PagedDecode:
    """The layout of one new token per row of a batch; small batches split the keys of a row."""

    def __init__(self, cache: PagedCache, kernels: ModuleType, rows: BatchState) -> None:
        self._cache, self._kernels = cache, kernels
        self._block_table, self._positions, self.slots = rows.block_table, rows.position, rows.slot
        # The kernel that combines the splits expects a power of two.
        splits_to_fill = _FULL_GPU_PROGRAMS // max(len(rows.greedy) * cache.kv_heads, 1)
        self._splits = min(_MAX_SPLITS, 1 << max(0, int(math.log2(max(splits_to_fill, 1)))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        self._cache.check_shape(k, v)
        self._kernels.store_kv(k, v, self.slots, self._cache, options.layer)
        return self._kernels.decode_attention(
            q, self._cache, self._block_table, self._positions, options, splits=self._splits
        )

    def attend_qkv(self, qkv: Tensor, rotary: RotaryTable, options: AttentionOptions) -> Tensor:
        return self._kernels.rope_attention(
            qkv,
            rotary,
            self._positions,
            self.slots,
            self._cache,
            self._block_table,
            options,
            splits=self._splits,
        )
