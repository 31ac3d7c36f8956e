"""Attention over rows laid end to end: every segment sees itself, and its parent if it has one.

On the CPU the segments are padded for the attention call only; on a GPU, whole rows go through torch's
variable-length kernel. Sliding windows are honoured. Score soft-capping is not, and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.ops.transfer import send
from hone.ops.varlen import varlen_attention


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

    roots: _Pad
    kids: _Pad | None
    kid_keys: (
        Tensor | None
    )  # [C, P + R] packed positions: the parent's tokens, then the child's own
    kid_bias: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)
    root_bias: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)
    cu_seqlens: Tensor | None = None  # [S + 1] int32, for the variable-length kernel

    @staticmethod
    def build(root_lengths: list[int], children: list[tuple[int, int]]) -> SegmentLayout:
        roots = _pad_index(root_lengths, 0)
        kids = kid_keys = None
        if any(n for _, n in children):  # one-token responses leave nothing to feed
            kids = _pad_index([n for _, n in children], sum(root_lengths))
            parents = torch.tensor([p for p, _ in children])
            kid_keys = torch.cat([roots.cells[parents], kids.cells], 1)
        cu = torch.tensor([0, *root_lengths]).cumsum(0).to(torch.int32)
        return SegmentLayout(
            list(root_lengths), list(children), roots, kids, kid_keys, cu_seqlens=cu
        )

    def to(self, device: torch.device) -> SegmentLayout:
        def move(pad: _Pad) -> _Pad:
            return pad._replace(cells=send(pad.cells, device), inverse=send(pad.inverse, device))

        return SegmentLayout(
            self.root_lengths,
            self.children,
            move(self.roots),
            move(self.kids) if self.kids else None,
            send(self.kid_keys, device) if self.kid_keys is not None else None,
            cu_seqlens=send(self.cu_seqlens, device) if self.cu_seqlens is not None else None,
        )

    def attend(
        self,
        q: Tensor,  # [N, H, D]
        k: Tensor,  # [N, KV, D]
        v: Tensor,  # [N, KV, D]
        *,
        layer: int,
        scaling: float,
        window: int | None,
    ) -> Tensor:  # [N, H, D]
        if q.is_cuda and q.dtype != torch.float32 and not self.children:
            return self._attend_varlen(q, k, v, scaling, window)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = self._attend_roots(q, k, v, scaling, window)
        if self.kids is None:
            return out
        return torch.cat([out, self._attend_children(q, k, v, scaling, window)])

    def _attend_roots(
        self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        longest = self.roots.cells.shape[1]
        bias = None
        if window is not None and window < longest:
            key = (window, q.dtype)
            if key not in self.root_bias:
                self.root_bias[key] = _window_bias(longest, window, q)
            bias = self.root_bias[key]
        q, k, v = (_pad(x, self.roots) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, scale=scaling
        )
        return _unpad(out, self.roots)

    def _attend_children(
        self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        assert self.kids is not None
        assert self.kid_keys is not None
        key = (window, q.dtype)
        if key not in self.kid_bias:
            self.kid_bias[key] = self._child_bias(window, q)
        kk, vv = (
            x.index_select(0, self.kid_keys.flatten())
            .view(*self.kid_keys.shape, *x.shape[1:])
            .transpose(1, 2)
            for x in (k, v)
        )
        out = F.scaled_dot_product_attention(
            _pad(q, self.kids), kk, vv, attn_mask=self.kid_bias[key], scale=scaling
        )
        return _unpad(out, self.kids)

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
        assert self.cu_seqlens is not None
        longest = max(self.root_lengths)
        return varlen_attention(
            q,
            k,
            v,
            self.cu_seqlens,
            self.cu_seqlens,
            longest,
            longest,
            scaling=scaling,
            window=window,
        )


def _pad_index(lengths: list[int], start: int) -> _Pad:
    n = torch.tensor(lengths)
    width = max(int(n.max()), 1)
    begin = start + torch.cat([torch.zeros(1, dtype=n.dtype), n.cumsum(0)[:-1]])
    offset = torch.arange(width)
    real = offset < n[:, None]
    index = torch.where(real, begin[:, None] + offset, begin[:, None].clamp(max=max(start, 0)))
    inverse = real.flatten().nonzero().flatten()
    return _Pad(index, inverse, start, bool((n == width).all()))


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
