"""Keys and values of running sequences on the CPU: one slot a sequence, contiguous, grown on demand.

Sequence i lives in slot i, so the rows of a step are a view of the cache and nothing is gathered. When a
sequence leaves, the last one moves into its slot.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_GRAIN = 64
"""Widths grow in this grain, so that attention shapes repeat and allocations are rare."""


class SlotCache:
    """Key-value memory for up to `slots` sequences."""

    def __init__(self, layers: int, slots: int) -> None:
        self._slots = slots
        self._width = 0
        self.keys: list[Tensor | None] = [None] * layers  # each [slots, KV, width, D]
        self.values: list[Tensor | None] = [None] * layers

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in [*self.keys, *self.values] if t is not None)

    def free(self) -> None:
        """Give the memory back; the next sequence allocates anew."""
        layers = len(self.keys)
        self.keys, self.values, self._width = [None] * layers, [None] * layers, 0

    def reserve(self, width: int) -> None:
        """Make room for sequences of `width` tokens, keeping what is stored."""
        if width <= self._width:
            return
        wanted = max(width, self._width * 3 // 2)
        self._width = -(-wanted // _GRAIN) * _GRAIN
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                if old is not None:
                    grown = old.new_zeros(old.shape[0], old.shape[1], self._width, old.shape[3])
                    grown[:, :, : old.shape[2]] = old
                    store[layer] = grown

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer; allocated when its first tokens [N, KV, D] arrive."""
        for store in (self.keys, self.values):
            if store[index] is None:
                store[index] = like.new_zeros(
                    self._slots, like.shape[1], self._width, like.shape[2]
                )
        keys, values = self.keys[index], self.values[index]
        assert keys is not None
        assert values is not None
        return keys, values

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens of one slot into another."""
        for store in (self.keys, self.values):
            for tensor in store:
                if tensor is not None:
                    tensor[target, :, :length] = tensor[source, :, :length]


class PrefillLayout:
    """New tokens of several slots at once, each after the tokens its slot already holds."""

    def __init__(
        self, cache: SlotCache, slots: list[int], starts: list[int], lengths: list[int]
    ) -> None:
        self._cache = cache
        n = torch.tensor(lengths)
        start = torch.tensor(starts)
        self._slots = torch.tensor(slots)
        self._width = int((start + n).max())
        longest = int(n.max())
        offset = torch.arange(longest)
        real = offset < n[:, None]
        begin = torch.cat([torch.zeros(1, dtype=n.dtype), n.cumsum(0)[:-1]])
        self._gather = torch.where(real, begin[:, None] + offset, begin[:, None])  # [S, L]
        self._cells = real.flatten().nonzero().flatten()
        self._token_slot = self._slots.repeat_interleave(n)
        self.positions = torch.cat(
            [torch.arange(a, a + b) for a, b in zip(starts, lengths, strict=True)]
        )
        self._query_position = start[:, None] + offset  # [S, L]
        self._plain = not any(starts)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, scaling: float, window: int | None
    ) -> Tensor:
        total = len(self.positions)
        keys, values = self._cache.layer(layer, k)
        keys[self._token_slot, :, self.positions] = k[:total]
        values[self._token_slot, :, self.positions] = v[:total]
        segments, longest = self._gather.shape
        padded = q.index_select(0, self._gather.flatten()).view(segments, longest, *q.shape[1:])
        groups = q.shape[1] // k.shape[1]
        past_k = keys[self._slots, :, : self._width].repeat_interleave(groups, 1)
        past_v = values[self._slots, :, : self._width].repeat_interleave(groups, 1)
        causal = self._plain and window is None
        out = F.scaled_dot_product_attention(
            padded.transpose(1, 2),
            past_k,
            past_v,
            attn_mask=None if causal else self._bias(window, q.dtype),
            is_causal=causal,
            scale=scaling,
        )
        rows = out.transpose(1, 2).reshape(-1, *q.shape[1:]).index_select(0, self._cells)
        return F.pad(rows, (0, 0, 0, 0, 0, q.shape[0] - total))

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        distance = self._query_position[:, :, None] - torch.arange(self._width)
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[:, None]


class DecodeLayout:
    """One new token for each of the first `len(positions)` slots."""

    def __init__(self, cache: SlotCache, positions: Tensor) -> None:
        self._cache = cache
        self._positions = positions
        self._rows = torch.arange(len(positions))
        self._width = -(-(int(positions.max()) + 1) // _GRAIN) * _GRAIN
        self._biases: dict[int | None, Tensor] = {}

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: int, scaling: float, window: int | None
    ) -> Tensor:
        rows, kv_heads = len(self._positions), k.shape[1]
        keys, values = self._cache.layer(layer, k)
        keys[self._rows, :, self._positions] = k[:rows]
        values[self._rows, :, self._positions] = v[:rows]
        if window not in self._biases:
            self._biases[window] = self._bias(window, q.dtype)
        # The queries that share a key head stand in for a query sequence: keys are never repeated.
        out = F.scaled_dot_product_attention(
            q[:rows].reshape(rows, kv_heads, -1, q.shape[2]),
            keys[:rows, :, : self._width],
            values[:rows, :, : self._width],
            attn_mask=self._biases[window],
            scale=scaling,
        )
        return F.pad(out.reshape(rows, *q.shape[1:]), (0, 0, 0, 0, 0, q.shape[0] - rows))

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        distance = self._positions[:, None] - torch.arange(self._width)
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))[
            :, None, None
        ]
