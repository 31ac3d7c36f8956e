"""Attention over padded and packed sequences, and functions that all attention layouts share.

Fused kernels support neither soft caps nor sinks. Attention with either is computed in float32, one
sequence at a time, and the backward pass recomputes the attention scores, so that only the scores of one
sequence are in memory. A segment of packed rows attends to itself and to its parent, if it has one: 16-bit
tensors on a GPU use a variable-length kernel; otherwise, segments are padded.

In shapes, H is the number of query heads, KV of key-value heads, L of queries, M of keys, N of concatenated
tokens and S of their sequences or segments; C is the number of children, D the head dimension, P and R are
the padded lengths of parents and children.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hone.ops.device import send
from hone.ops.shared_keys import SharedKeys

logger = logging.getLogger(__name__)

_PACKAGES = (("flash_attn_interface", 9), ("flash_attn.cute", 9), ("flash_attn", 8))
"""Modules with `flash_attn_varlen_func`, fastest first, and the major compute capability each one needs."""
_BiasKey = tuple[int | None, torch.dtype]
"""The window and the dtype of an attention bias."""


class AttentionOptions(NamedTuple):
    """The attention options of one layer."""

    layer: int  # index of the layer
    scaling: float  # of the attention scores
    window: int | None = None  # of sliding-window attention
    softcap: float | None = None
    sinks: Tensor | None = None  # [H] logits

    @property
    def needs_scores(self) -> bool:
        """Whether attention must materialize its scores, because fused kernels do not support the options."""
        return self.softcap is not None or self.sinks is not None


def padded_attention(
    q: Tensor,  # [B, H, L, D]
    k: Tensor,  # [B, H, M, D]
    v: Tensor,  # [B, H, M, D]
    bias: Tensor | None,  # [L, M] or [B, 1, L, M], -inf where a key is masked; None: causal
    options: AttentionOptions,
) -> Tensor:  # [B, H, L, D]
    """Returns softmax(softcap(scaling · q · kᵀ) + bias) · v.

    A sink adds a term to the denominator of every softmax of its head.
    """
    if not options.needs_scores:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=bias is None, scale=options.scaling
        )
    if bias is None:
        bias = q.new_full((q.shape[2], k.shape[2]), float("-inf")).triu(1)
    use_checkpoint = torch.is_grad_enabled() and q.requires_grad
    out = []
    for i in range(len(q)):
        inputs = (q[i], k[i], v[i], bias if bias.dim() == 2 else bias[i, 0], options)
        out.append(
            checkpoint(_attend, *inputs, use_reentrant=False)
            if use_checkpoint
            else _attend(*inputs)
        )
    return torch.stack(out)


def _attend(
    q: Tensor,  # [H, L, D]
    k: Tensor,
    v: Tensor,
    bias: Tensor,  # [L, M]
    options: AttentionOptions,
) -> Tensor:
    scores = soft_cap(
        torch.matmul(q.float(), k.float().transpose(1, 2)) * options.scaling, options.softcap
    )
    sinks = None if options.sinks is None else options.sinks[:, None, None]
    return torch.matmul(softmax_with_sinks(scores + bias, sinks).to(v.dtype), v)


def soft_cap(scores: Tensor, softcap: float | None) -> Tensor:
    """Limits scores to (-softcap, softcap) by tanh."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the softmax over the last dimension; a sink is one more key, whose value is 0."""
    if sinks is None:
        return torch.softmax(scores, -1)
    sink_scores = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink_scores], -1), -1)[..., :-1]


def is_visible(distance: Tensor, window: int | None) -> Tensor:
    """Returns whether a query may attend to a key that is `distance` tokens before it."""
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 0 for visible keys and -inf for masked keys."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, float("-inf"))


def repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values [N, KV, D] repeated to the number of query heads, [N, H, D]."""
    group_size = q.shape[1] // k.shape[1]
    if group_size == 1:
        return k, v
    return k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)


def fits_varlen(q: Tensor) -> bool:
    """Returns whether `varlen_attention` supports the device, dtype and head dimension of q [N, H, D]."""
    return q.is_cuda and q.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def varlen_attention(
    q: Tensor,  # [N, H, D]
    k: Tensor,  # [M, KV, D]
    v: Tensor,  # [M, KV, D]
    cu_q: Tensor,  # [S + 1] int32, cumulative number of queries
    cu_k: Tensor,  # [S + 1] int32, cumulative number of keys
    max_q: int,
    max_k: int,
    *,
    scaling: float,
    window: int | None,
) -> Tensor:  # [N, H, D]
    """Returns causal attention over concatenated 16-bit sequences on a GPU.

    The last query and the last key of a sequence have the same position. If a flash-attn package that
    supports this GPU is installed, its kernel is used instead of torch's.
    """
    attend = _package_kernel() or _torch_attention
    return attend(q, k, v, cu_q, cu_k, max_q, max_k, scaling, window)


def _torch_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    scaling: float, window: int | None,
) -> Tensor:  # fmt: skip
    # torch.nn.attention.varlen calls this operator, but takes much host time.
    return torch.ops.aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, window is None, False,
        scale=scaling, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )[0]  # fmt: skip


@functools.cache
def _package_kernel() -> Callable[..., Tensor] | None:
    """Returns the kernel of an installed package, or None."""
    major, _ = torch.cuda.get_device_capability()
    for name, min_capability in _PACKAGES:
        if major < min_capability:
            continue
        try:
            kernel = importlib.import_module(name).flash_attn_varlen_func
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError, AttributeError) as error:
            # The package was built for another torch version, or another package has this name.
            logger.warning("%s is installed but cannot be used here: %s", name, error)
            continue
        logger.info("attention over packed rows uses %s", name)
        return functools.partial(_package_attention, kernel)
    return None


def _package_attention(
    kernel: Callable[..., Tensor | tuple[Tensor, ...]],
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
    scaling: float, window: int | None,
) -> Tensor:  # fmt: skip
    out = kernel(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
        softmax_scale=scaling, causal=True,
        **({} if window is None else {"window_size": (window - 1, 0)}),
    )  # fmt: skip
    return out[0] if isinstance(out, tuple) else out


class Padding(NamedTuple):
    """The mapping between consecutive packed segments (N_s tokens) and a padded batch."""

    cells: Tensor  # [S, L] packed position of each cell; `start` where the cell is padding
    cell_indices: Tensor  # [N_s] flat index of each packed position's cell
    start: int  # packed position of the first segment
    equal_lengths: bool  # whether no cell is padding, so that a view suffices

    @staticmethod
    def of(lengths: list[int], *, start: int = 0, multiple: int = 1) -> Padding:
        """Pads consecutive segments, the first at position `start`, to a multiple of `multiple`."""
        n = torch.tensor(lengths)
        width = -(-max(int(n.max()), 1) // multiple) * multiple
        starts = start + n.cumsum(0) - n
        offset = torch.arange(width)
        is_token = offset < n[:, None]
        cells = torch.where(is_token, starts[:, None] + offset, start)
        cell_indices = is_token.flatten().nonzero().flatten()
        return Padding(cells, cell_indices, start, bool((n == width).all()))

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
        return self._padding(self.root_lengths, start=0)

    @cached_property
    def _children(self) -> Padding | None:
        lengths = [n for _, n in self.children]
        if not any(lengths):  # a one-token response has no packed tokens
            return None
        return self._padding(lengths, start=sum(self.root_lengths))

    def _padding(self, lengths: list[int], start: int) -> Padding:
        padding = Padding.of(lengths, start=start)
        cells, cell_indices = map(self._to_device, (padding.cells, padding.cell_indices))
        return padding._replace(cells=cells, cell_indices=cell_indices)

    def _to_device(self, x: Tensor) -> Tensor:
        return x if self.device.type == "cpu" else send(x, self.device)

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
        return self._to_device(torch.tensor([p for p, _ in self.children]))

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
        lengths = self._to_device(torch.tensor(self.root_lengths))[self._parents]
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
