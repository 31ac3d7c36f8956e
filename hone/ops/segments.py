"""Attention over rows laid end to end: every segment sees itself, and its parent if it has one.

On the CPU the segments are padded for the attention call only; on a GPU in 16 bits they go through a
variable-length kernel. Sliding windows are honoured; soft-capped scores and sinks are computed plainly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.scored_attention import scored_attention
from hone.ops.shared_keys import SharedKeys
from hone.ops.transfer import send
from hone.ops.varlen import fits_varlen, varlen_attention

_Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Padded queries, keys and values [S, H, L, D] and a bias (None: causal) to what the queries read."""


class _Pad(NamedTuple):
    """How packed segments become a padded rectangle and back."""

    cells: Tensor  # [S, L] packed position of each cell; padding points at a real one
    inverse: Tensor  # [N_s] cell of each packed position
    start: int  # first packed position
    regular: bool  # all segments have one length: views do, no gather needed


@dataclass
class SegmentLayout:
    """Which packed tokens attend to which: root segments first, then children of roots."""

    root_lengths: list[int]
    children: list[tuple[int, int]]
    """(parent root, length) of every child segment."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    kid_bias: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)
    root_bias: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> SegmentLayout:
        return SegmentLayout(self.root_lengths, self.children, device)

    @cached_property
    def roots(self) -> _Pad:
        return _pad_index(self.root_lengths, 0, self.device)

    @cached_property
    def kids(self) -> _Pad | None:
        lengths = [n for _, n in self.children]
        if not any(lengths):  # one-token responses leave nothing to feed
            return None
        return _pad_index(lengths, sum(self.root_lengths), self.device)

    @cached_property
    def kid_keys(self) -> Tensor:  # [C, P + R]
        """Packed positions: the parent's tokens, then the child's own."""
        assert self.kids is not None
        parents = send(torch.tensor([p for p, _ in self.children]), self.device)
        return torch.cat([self.roots.cells[parents], self.kids.cells], 1)

    @cached_property
    def shared_keys(self) -> SharedKeys:
        return SharedKeys.build(self.root_lengths, self.children, self.device)

    def attend(
        self,
        q: Tensor,  # [N, H, D]
        k: Tensor,  # [N, KV, D]
        v: Tensor,  # [N, KV, D]
        *,
        layer: int,
        scaling: float,
        window: int | None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # [N, H, D]
        scored = softcap is not None or sinks is not None
        if fits_varlen(q) and not scored:
            return self._attend_varlen(q, k, v, scaling, window)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        attend: _Attend = partial(_fused_attention, scaling=scaling)
        if scored:
            attend = partial(scored_attention, scaling=scaling, softcap=softcap, sinks=sinks)
        out = self._attend_roots(q, k, v, window, attend)
        if self.kids is None:
            return out
        return torch.cat([out, self._attend_children(q, k, v, window, attend)])

    def _attend_roots(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None, attend: _Attend
    ) -> Tensor:
        longest = self.roots.cells.shape[1]
        bias = None
        if window is not None and window < longest:
            key = (window, q.dtype)
            if key not in self.root_bias:
                self.root_bias[key] = _window_bias(longest, window, q)
            bias = self.root_bias[key]
        q, k, v = (_pad(x, self.roots) for x in (q, k, v))
        return _unpad(attend(q, k, v, bias), self.roots)

    def _attend_children(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None, attend: _Attend
    ) -> Tensor:
        assert self.kids is not None
        key = (window, q.dtype)
        if key not in self.kid_bias:
            self.kid_bias[key] = self._child_bias(window, q)
        kk, vv = (
            x.index_select(0, self.kid_keys.flatten())
            .view(*self.kid_keys.shape, *x.shape[1:])
            .transpose(1, 2)
            for x in (k, v)
        )
        return _unpad(attend(_pad(q, self.kids), kk, vv, self.kid_bias[key]), self.kids)

    def _child_bias(self, window: int | None, like: Tensor) -> Tensor:  # [C, 1, R, P + R]
        """A child sees its parent's real tokens and its own up to itself.

        Padded queries keep the keys that causality gives them, so no row is masked whole (that would be NaN).
        """
        assert self.kids is not None
        device = like.device
        prompt_width, width = self.roots.cells.shape[1], self.kids.cells.shape[1]
        parent_lengths = torch.tensor(
            [self.root_lengths[p] for p, _ in self.children], device=device
        )
        own = torch.arange(width, device=device)
        parent_positions = torch.arange(prompt_width, device=device)
        query_position = parent_lengths[:, None] + own  # [C, R]
        sees_parent = (parent_positions < parent_lengths[:, None])[:, None, :].expand(-1, width, -1)
        sees_own = (own[:, None] >= own).expand(len(parent_lengths), -1, -1)
        if window is not None:
            near = query_position[:, :, None] - parent_positions < window
            sees_parent = sees_parent & near
            sees_own = sees_own & (own[:, None] - own < window)
        allowed = torch.cat([sees_parent, sees_own], -1)
        return _as_bias(allowed, like)[:, None]

    def _attend_varlen(
        self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        keys = self.shared_keys
        return varlen_attention(
            q,
            *keys.lay(k, v),
            keys.cu_queries,
            keys.cu_keys,
            keys.longest_query,
            keys.longest_keys,
            scaling=scaling,
            window=window,
        )


def _fused_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, scaling: float
) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=bias is None, scale=scaling
    )


def _pad_index(lengths: list[int], start: int, device: torch.device) -> _Pad:
    n = torch.tensor(lengths)
    width = max(int(n.max()), 1)
    begin = start + torch.cat([torch.zeros(1, dtype=n.dtype), n.cumsum(0)[:-1]])
    offset = torch.arange(width)
    real = offset < n[:, None]
    index = torch.where(real, begin[:, None] + offset, begin[:, None].clamp(max=max(start, 0)))
    inverse = real.flatten().nonzero().flatten()
    return _Pad(send(index, device), send(inverse, device), start, bool((n == width).all()))


def _pad(x: Tensor, pad: _Pad) -> Tensor:  # [N, H, D] -> [S, H, L, D]
    segments, width = pad.cells.shape
    if pad.regular:
        rows = x[pad.start : pad.start + segments * width]
    else:
        rows = x.index_select(0, pad.cells.flatten())
    return rows.view(segments, width, *x.shape[1:]).transpose(1, 2)


def _unpad(x: Tensor, pad: _Pad) -> Tensor:  # [S, H, L, D] -> [N_s, H, D]
    rows = x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
    return rows if pad.regular else rows.index_select(0, pad.inverse)


def _window_bias(length: int, window: int, like: Tensor) -> Tensor:
    position = torch.arange(length, device=like.device)
    distance = position[:, None] - position
    return _as_bias((distance >= 0) & (distance < window), like)


def _as_bias(allowed: Tensor, like: Tensor) -> Tensor:
    bias = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill_(~allowed, float("-inf"))
