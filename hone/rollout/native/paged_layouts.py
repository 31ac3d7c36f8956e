"""Attention over pages, as the layout that the model's attention asks: prompts at once, then steps.

Both write the new keys and values first. `attend` is what any Hugging Face model calls; `attend_joined`
takes queries, keys and values as one product gave them, not rotated yet.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.scored_attention import scored_attention
from hone.ops.transfer import send
from hone.ops.varlen import fits_varlen, varlen_attention
from hone.rollout.native.kernels_reference import Turn
from hone.rollout.native.paged_cache import PagedCache


class PagedPrefill:
    """New tokens of several sequences, each after the tokens its pages already hold."""

    def __init__(
        self,
        cache: PagedCache,
        kernels: ModuleType,
        pages: list[list[int]],
        starts: list[int],
        lengths: list[int],
        device: torch.device,
    ) -> None:
        self.cache, self._kernels = cache, kernels
        size = cache.page_size
        ends = [a + n for a, n in zip(starts, lengths, strict=True)]
        offsets = np.arange(size)
        whole = [
            (np.array(p[: -(-end // size)])[:, None] * size + offsets).reshape(-1)[:end]
            for p, end in zip(pages, ends, strict=True)
        ]
        spans = list(zip(starts, ends, strict=True))
        self.positions = _sent([np.arange(a, b) for a, b in spans], device)
        self.slots = _sent([w[a:] for w, a in zip(whole, starts, strict=True)], device)
        self._seen = _sent(whole, device) if any(starts) else None
        self._starts, self._lengths, self._ends = starts, lengths, ends
        self._cu_q, self._cu_k = (
            send(torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32), device)
            for n in (lengths, ends)
        )

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
        self.cache.check(k, v)
        self._kernels.store(k, v, self.slots, self.cache, layer)
        if softcap is None and sinks is None:
            return self._attend_stored(q, k, v, layer, scaling, window)
        if self._seen is not None:
            k, v = self._gathered(layer)
        return self._attend_one_by_one(q, k, v, scaling, window, softcap, sinks)

    def attend_joined(
        self, qkv: Tensor, turn: Turn, *, layer: int, scaling: float, window: int | None
    ) -> Tensor:
        q, k, v = self._kernels.rope_store(
            qkv, turn, self.positions, self.slots, self.cache, layer, keep_keys=True
        )
        return self._attend_stored(q, k, v, layer, scaling, window)

    def _attend_stored(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, window: int | None
    ) -> Tensor:
        if self._seen is not None:
            k, v = self._gathered(layer)
        if fits_varlen(q):
            longest = max(self._lengths), max(self._ends)
            return varlen_attention(
                q, k, v, self._cu_q, self._cu_k, *longest, scaling=scaling, window=window
            )
        return self._attend_one_by_one(q, k, v, scaling, window)

    def _gathered(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the sequences from their first token on, packed."""
        assert self._seen is not None
        page, offset = self._seen // self.cache.page_size, self._seen % self.cache.page_size
        keys, values = self.cache.layer(layer)
        return keys[page, :, offset], values[page, :, offset]

    def _attend_one_by_one(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Where no variable-length kernel serves: on a CPU, in float32, for capped scores and sinks."""
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = torch.empty_like(q)
        at_q = at_k = 0
        for start, length, end in zip(self._starts, self._lengths, self._ends, strict=True):
            distance = torch.arange(start, end, device=q.device)[:, None] - torch.arange(
                end, device=q.device
            )
            seen = distance >= 0
            if window is not None:
                seen &= distance < window
            bias = q.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
            given = (
                q[at_q : at_q + length].transpose(0, 1)[None],
                k[at_k : at_k + end].transpose(0, 1)[None],
                v[at_k : at_k + end].transpose(0, 1)[None],
                bias,
            )
            if softcap is None and sinks is None:
                part = F.scaled_dot_product_attention(*given, scale=scaling)
            else:
                part = scored_attention(*given, scaling=scaling, softcap=softcap, sinks=sinks)
            out[at_q : at_q + length] = part[0].transpose(0, 1)
            at_q, at_k = at_q + length, at_k + end
        return out


def _sent(pieces: list[np.ndarray], device: torch.device) -> Tensor:
    return send(torch.from_numpy(np.concatenate(pieces)), device)


class PagedDecode:
    """One new token for each row of a batch."""

    def __init__(
        self,
        cache: PagedCache,
        kernels: ModuleType,
        *,
        table: Tensor,
        positions: Tensor,
        slots: Tensor,
        splits: int,
    ) -> None:
        self.cache, self._kernels = cache, kernels
        self._table, self.positions, self.slots = table, positions, slots
        self._splits = splits

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
        self.cache.check(k, v)
        self._kernels.store(k, v, self.slots, self.cache, layer)
        return self._kernels.decode_attention(
            q,
            self.cache,
            layer,
            self._table,
            self.positions,
            scaling=scaling,
            window=window,
            splits=self._splits,
            softcap=softcap,
            sinks=sinks,
        )

    def attend_joined(
        self, qkv: Tensor, turn: Turn, *, layer: int, scaling: float, window: int | None
    ) -> Tensor:
        return self._kernels.rope_attention(
            qkv,
            turn,
            self.positions,
            self.slots,
            self.cache,
            layer,
            self._table,
            scaling=scaling,
            window=window,
            splits=self._splits,
        )
