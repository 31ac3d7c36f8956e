"""Layouts for attention over the paged cache: prefill and decode.

Both write the new keys and values first. Hugging Face models call `attend`; the fused decoder calls
`attend_joined` with queries, keys and values as one tensor, before the rotation.
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
    is_visible,
    padded_attention,
    repeat_heads,
)
from hone.ops.transfer import send
from hone.ops.varlen import fits_varlen, varlen_attention
from hone.rollout.native.batch_state import BatchState
from hone.rollout.native.kernels_reference import RotaryTable
from hone.rollout.native.paged_cache import PagedCache

_PROGRAMS = 512
"""Attention programs that fill a large GPU; small batches split keys to reach this number."""
_MOST_SPLITS = 16


class PagedPrefill:
    """New tokens of several sequences, which follow the cached tokens of their sequences."""

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
        size = cache.block_size
        ends = [a + n for a, n in zip(starts, lengths, strict=True)]
        offsets = np.arange(size)
        slots = [
            (np.array(b[: -(-end // size)])[:, None] * size + offsets).reshape(-1)[:end]
            for b, end in zip(blocks, ends, strict=True)
        ]
        spans = list(zip(starts, ends, strict=True))
        self.positions = _sent([np.arange(a, b) for a, b in spans], device)
        self.slots = self._slots = _sent(
            [s[a:] for s, a in zip(slots, starts, strict=True)], device
        )
        self._key_slots = _sent(slots, device) if any(starts) else None
        self._spans = spans
        self._longest = max(lengths), max(ends)
        self._cu_q, self._cu_k = (
            send(torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
            for n in (lengths, ends)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        self._cache.check(k, v)
        self._kernels.store(k, v, self._slots, self._cache, options.layer)
        return self._attend(q, k, v, options)

    def attend_joined(self, qkv: Tensor, rotary: RotaryTable, options: AttentionOptions) -> Tensor:
        q, k, v = self._kernels.rope_store(
            qkv, rotary, self.positions, self._slots, self._cache, options.layer, keep_keys=True
        )
        return self._attend(q, k, v, options)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        if self._key_slots is not None:  # prefix-cache hits: read all keys from the cache
            size = self._cache.block_size
            block, offset = self._key_slots // size, self._key_slots % size
            k, v = (plane[block, :, offset] for plane in self._cache.layer(options.layer))
        if fits_varlen(q) and not options.needs_scores:
            scaling, window = options.scaling, options.window
            return varlen_attention(
                q, k, v, self._cu_q, self._cu_k, *self._longest, scaling=scaling, window=window
            )
        k, v = repeat_heads(q, k, v)
        out = torch.empty_like(q)
        at_q = at_k = 0
        for start, end in self._spans:
            of_q, of_k = slice(at_q, at_q + end - start), slice(at_k, at_k + end)
            position = torch.arange(end, device=q.device)
            visible = is_visible(position[start:, None] - position, options.window)
            queries, keys, values = (x.transpose(0, 1)[None] for x in (q[of_q], k[of_k], v[of_k]))
            part = padded_attention(queries, keys, values, as_bias(visible, q.dtype), options)
            out[of_q] = part[0].transpose(0, 1)
            at_q, at_k = of_q.stop, of_k.stop
        return out


def _sent(pieces: list[np.ndarray], device: torch.device) -> Tensor:
    return send(torch.from_numpy(np.concatenate(pieces)), device)


class PagedDecode:
    """One new token per row of a batch; small batches split attention over keys."""

    def __init__(self, cache: PagedCache, kernels: ModuleType, rows: BatchState) -> None:
        self._cache, self._kernels = cache, kernels
        self._block_table, self._positions, self._slots = rows.block_table, rows.position, rows.slot
        self.slots = self._slots
        programs = _PROGRAMS // max(len(rows.greedy) * cache.kv_heads, 1)
        self._splits = min(_MOST_SPLITS, 1 << max(0, int(math.log2(max(programs, 1)))))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        self._cache.check(k, v)
        self._kernels.store(k, v, self._slots, self._cache, options.layer)
        return self._kernels.decode_attention(
            q, self._cache, self._block_table, self._positions, options, splits=self._splits
        )

    def attend_joined(self, qkv: Tensor, rotary: RotaryTable, options: AttentionOptions) -> Tensor:
        return self._kernels.rope_attention(
            qkv,
            rotary,
            self._positions,
            self._slots,
            self._cache,
            self._block_table,
            options,
            splits=self._splits,
        )
