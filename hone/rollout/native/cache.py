"""Keys and values of running sequences on the CPU: one slot a sequence, contiguous, grown on demand.

Sequence i lives in slot i, so the rows of a step are a view of the cache and nothing is gathered. When a
sequence leaves, the last one moves into its slot.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.scored_attention import cap, scored_attention, weigh

_GRAIN = 64
"""The cache grows in this grain, so that allocations are rare."""
_SUM_GRAIN = 16
"""Attention reads keys in this grain, so that its sums run in the same order in any batch."""
_SMALL_PRODUCT = 400
"""Below so many multiplications torch takes another path for a batched product, with other rounding."""


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
        self._width = _up(wanted, _GRAIN)
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
    """Whole prompts into empty slots, all at once."""

    def __init__(self, cache: SlotCache, slots: list[int], lengths: list[int]) -> None:
        self._cache = cache
        n = torch.tensor(lengths)
        # Rounded up, because a vector register's tail is summed in another order.
        longest = _up(max(lengths), _SUM_GRAIN)
        offset = torch.arange(longest)
        real = offset < n[:, None]
        begin = n.cumsum(0) - n
        self._gather = torch.where(real, begin[:, None] + offset, begin[:, None])  # [S, L]
        self._cells = real.flatten().nonzero().flatten()
        self._regular = min(lengths) == longest  # views do, nothing is gathered
        self._slots, self._longest = torch.tensor(slots), longest
        self._slot = self._slots.repeat_interleave(n)  # [N]
        self.positions = offset.expand(len(slots), -1)[real]  # [N]
        self._biases: dict[int, Tensor] = {}

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int,
        scaling: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        self._store(k, v, *self._cache.layer(layer, k))
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        bias = self._bias(window, q.dtype) if window is not None else None
        q, k, v = (self._pad(x) for x in (q, k, v))
        if softcap is not None or sinks is not None:
            out = scored_attention(q, k, v, bias, scaling=scaling, softcap=softcap, sinks=sinks)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, is_causal=bias is None, scale=scaling
            )
        rows = out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])
        return rows if self._regular else rows.index_select(0, self._cells)

    def _store(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> None:
        if self._regular:
            for new, store in ((k, keys), (v, values)):
                rows = new.view(len(self._slots), self._longest, *new.shape[1:]).transpose(1, 2)
                store[:, :, : self._longest].index_copy_(0, self._slots, rows)
            return
        keys[self._slot, :, self.positions] = k
        values[self._slot, :, self.positions] = v

    def _pad(self, x: Tensor) -> Tensor:  # [N, H, D] -> [S, H, L, D]
        if self._regular:
            return x.view(*self._gather.shape, *x.shape[1:]).transpose(1, 2)
        rows = x.index_select(0, self._gather.flatten())
        return rows.view(*self._gather.shape, *x.shape[1:]).transpose(1, 2)

    def _bias(self, window: int, dtype: torch.dtype) -> Tensor:  # [L, L]
        if window not in self._biases:
            position = torch.arange(self._gather.shape[1])
            self._biases[window] = _visible(position[:, None] - position, window, dtype)
        return self._biases[window]


class DecodeLayout:
    """One new token for each of the first `len(positions)` slots."""

    def __init__(self, cache: SlotCache, positions: Tensor) -> None:
        self._cache = cache
        self._positions = positions
        self._longest = int(positions.max()) + 1
        self._width = 0  # of the keys that attention reads
        self._biases: dict[int | None, Tensor] = {}
        self._cells: Tensor | None = None

    def __len__(self) -> int:
        return len(self._positions)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int,
        scaling: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        rows, kv_heads, head_dim = k.shape
        keys, values = self._cache.layer(layer, k)
        if self._cells is None:
            grain = _up(_SMALL_PRODUCT // head_dim + 1, _SUM_GRAIN)
            self._width = min(_up(self._longest, grain), keys.shape[2])
            head = torch.arange(rows * kv_heads).view(rows, kv_heads)
            self._cells = (head * keys.shape[2] + self._positions[:, None]).flatten()
        keys.view(-1, head_dim).index_copy_(0, self._cells, k.reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, self._cells, v.reshape(-1, head_dim))
        if window not in self._biases:
            distance = self._positions[:, None] - torch.arange(self._width)
            bias = _visible(distance, window, q.dtype)
            self._biases[window] = bias.repeat_interleave(kv_heads, 0)[:, None]  # [rows · KV, 1, W]
        # The queries that share a key head stand in for a query sequence: keys are never repeated. Two
        # batched products are twice as fast as torch's fused attention where a query has so few rows.
        queries = (q * scaling).reshape(rows * kv_heads, -1, head_dim)
        seen = keys[:rows, :, : self._width].flatten(0, 1)
        scores = cap(torch.bmm(queries, seen.transpose(1, 2)), softcap).add_(self._biases[window])
        read = values[:rows, :, : self._width].flatten(0, 1)
        if sinks is not None:
            sinks = sinks.view(kv_heads, -1, 1).repeat(rows, 1, 1)
        return torch.bmm(weigh(scores, sinks), read).view(q.shape)


class JointLayout:
    """Running sequences, one token each, then new prompts, then rows that only fill up."""

    def __init__(self, decode: DecodeLayout | None, prefill: PrefillLayout | None) -> None:
        self._decode = decode
        self._prefill = prefill
        self._running = len(decode) if decode else 0
        self._used = self._running + (len(prefill.positions) if prefill else 0)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        layer: int,
        scaling: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        parts = []
        for layout, begin, end in (
            (self._decode, 0, self._running),
            (self._prefill, self._running, self._used),
        ):
            if layout is not None:
                mine = (x[begin:end] for x in (q, k, v))
                parts.append(
                    layout.attend(
                        *mine,
                        layer=layer,
                        scaling=scaling,
                        window=window,
                        softcap=softcap,
                        sinks=sinks,
                    )
                )
        if self._used < len(q):
            parts.append(q.new_zeros(len(q) - self._used, *q.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _up(length: int, grain: int) -> int:
    """The next multiple of the grain."""
    return -(-length // grain) * grain


def _visible(distance: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where a key at this distance before the query is seen, -inf where not."""
    seen = distance >= 0
    if window is not None:
        seen &= distance < window
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
