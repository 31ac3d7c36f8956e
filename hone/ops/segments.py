"""Attention over packed rows: a segment attends to itself and to its parent, if it has one.

16-bit tensors on a GPU use a variable-length kernel; otherwise, segments are padded.

In shapes, N is the number of packed tokens, S of segments, C of children, H of query heads and KV of
key-value heads; D is the head dimension, and L, P and R are padded lengths (of segments, parents, children).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

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
from hone.ops.shared_keys import SharedKeys

_BiasKey = tuple[int | None, torch.dtype]


class Padding(NamedTuple):
    """The mapping between consecutive packed segments (N_s tokens) and a padded batch."""

    cells: Tensor  # [S, L] packed position of each cell; `start` where the cell is padding
    cell_indices: Tensor  # [N_s] flat index of each packed position's cell
    start: int  # packed position of the first segment
    equal_lengths: bool  # whether no cell is padding, so that a view suffices

    @staticmethod
    def of(
        lengths: list[int], device: torch.device, *, start: int = 0, multiple: int = 1
    ) -> Padding:
        """Pads consecutive segments, the first at position `start`, to a multiple of `multiple`."""
        n = torch.tensor(lengths)
        width = -(-max(int(n.max()), 1) // multiple) * multiple
        starts = start + n.cumsum(0) - n
        offset = torch.arange(width)
        is_token = offset < n[:, None]
        cells = torch.where(is_token, starts[:, None] + offset, start)
        cell_indices = is_token.flatten().nonzero().flatten()
        return Padding(
            send(cells, device), send(cell_indices, device), start, bool((n == width).all())
        )

    def pad(self, x: Tensor) -> Tensor:  # [N, H, D] -> [S, H, L, D]
        segments, width = self.cells.shape
        if self.equal_lengths:
            rows = x[self.start : self.start + segments * width]
        else:
            rows = x.index_select(0, self.cells.flatten())
        return rows.view(segments, width, *x.shape[1:]).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:  # [S, H, L, D] -> [N_s, H, D]
        rows = x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
        return rows if self.equal_lengths else rows.index_select(0, self.cell_indices)


@dataclass
class SegmentLayout:
    """The attention layout of packed rows: root segments, then the children of roots."""

    root_lengths: list[int]
    children: list[tuple[int, int]]
    """The index of the root and the length of each child segment."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    child_biases: dict[_BiasKey, Tensor] = field(default_factory=dict)
    root_biases: dict[_BiasKey, Tensor] = field(default_factory=dict)
    """Attention biases by window and dtype; layers share them."""

    def to(self, device: torch.device) -> SegmentLayout:
        return SegmentLayout(self.root_lengths, self.children, device)

    @cached_property
    def _roots(self) -> Padding:
        return Padding.of(self.root_lengths, self.device)

    @cached_property
    def _children(self) -> Padding | None:
        lengths = [n for _, n in self.children]
        if not any(lengths):  # a one-token response has no packed tokens
            return None
        return Padding.of(lengths, self.device, start=sum(self.root_lengths))

    @cached_property
    def _shared_keys(self) -> SharedKeys:
        return SharedKeys.build(self.root_lengths, self.children, self.device)

    def attend(
        self,
        q: Tensor,  # [N, H, D]
        k: Tensor,  # [N, KV, D]
        v: Tensor,  # [N, KV, D]
        options: AttentionOptions,
    ) -> Tensor:  # [N, H, D]
        if fits_varlen(q) and not options.needs_scores:
            shared_keys = self._shared_keys
            return varlen_attention(
                q,
                *shared_keys.repeat(k, v),
                shared_keys.cu_queries,
                shared_keys.cu_keys,
                shared_keys.max_queries,
                shared_keys.max_keys,
                scaling=options.scaling,
                window=options.window,
            )
        k, v = repeat_heads(q, k, v)
        out = self._attend_roots(q, k, v, options)
        if self._children is None:
            return out
        return torch.cat([out, self._attend_children(q, k, v, self._children, options)])

    def _attend_roots(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        width, window = self._roots.cells.shape[1], options.window
        bias = None
        if window is not None and window < width:
            key = (window, q.dtype)
            if key not in self.root_biases:
                position = torch.arange(width, device=q.device)
                visible = is_visible(position[:, None] - position, window)
                self.root_biases[key] = as_bias(visible, q.dtype)
            bias = self.root_biases[key]
        q, k, v = (self._roots.pad(x) for x in (q, k, v))
        return self._roots.unpad(padded_attention(q, k, v, bias, options))

    def _attend_children(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Padding, options: AttentionOptions
    ) -> Tensor:
        key = (options.window, q.dtype)
        if key not in self.child_biases:
            self.child_biases[key] = self._child_bias(padding.cells.shape[1], *key)
        cells = self._child_cells
        k, v = (
            x.index_select(0, cells.flatten()).view(*cells.shape, *x.shape[1:]).transpose(1, 2)
            for x in (k, v)
        )
        out = padded_attention(padding.pad(q), k, v, self.child_biases[key], options)
        return padding.unpad(out)

    @cached_property
    def _parents(self) -> Tensor:
        return send(torch.tensor([p for p, _ in self.children]), self.device)

    @cached_property
    def _child_cells(self) -> Tensor:  # [C, P + R]
        """The packed positions that each child attends to: its parent's tokens, then its own."""
        assert self._children is not None
        return torch.cat([self._roots.cells[self._parents], self._children.cells], 1)

    def _child_bias(
        self, width: int, window: int | None, dtype: torch.dtype
    ) -> Tensor:  # [C, 1, R, P + R]
        """Returns the bias with which each child attends to its whole parent and causally to itself.

        Padding queries attend to keys too, because the softmax of a fully masked row is NaN.
        """
        lengths = send(torch.tensor(self.root_lengths), self.device)[self._parents]
        own_positions = torch.arange(width, device=self.device)
        parent_positions = torch.arange(self._roots.cells.shape[1], device=self.device)
        sees_parent = (parent_positions < lengths[:, None])[:, None, :].expand(-1, width, -1)
        sees_own = is_visible(own_positions[:, None] - own_positions, window).expand(
            len(lengths), -1, -1
        )
        if window is not None:
            position = lengths[:, None] + own_positions  # [C, R]
            sees_parent = sees_parent & (position[:, :, None] - parent_positions < window)
        return as_bias(torch.cat([sees_parent, sees_own], -1), dtype)[:, None]
