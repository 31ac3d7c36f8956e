"""Attention over padded and packed sequences, and functions that all attention layouts share.

Fused kernels support neither soft caps nor sinks. Attention with either is computed in float32, one
sequence at a time, and its backward pass recomputes the attention scores to save memory.

Packed tokens consist of segments. A root is the prompt of a group, or a prompt with its response; a
child is one response to a root, and attends to its root and to itself. 16-bit tensors on a GPU use a varlen
kernel, for which a root's keys and values are copied before those of each child; others are padded.

In shapes, H is the number of query heads, KV of key-value heads, L of queries, M of keys, N of
concatenated tokens and S of their sequences or segments; C is the number of children, D the head
dimension, P and R are the padded lengths of roots and children.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hone.ops.autograd import Context
from hone.protocol.rows import to_device

logger = logging.getLogger(__name__)

_PACKAGES = (("flash_attn_interface", 9), ("flash_attn.cute", 9), ("flash_attn", 8))
"""Modules with `flash_attn_varlen_func`, fastest first, and the major compute capability each one needs."""


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
    attend: Callable[..., Tensor] = _attend_in_float32
    if torch.is_grad_enabled() and q.requires_grad:
        attend = functools.partial(checkpoint, _attend_in_float32, use_reentrant=False)
    biases = bias.expand(len(q), 1, *bias.shape[-2:])
    return torch.stack([attend(q[i], k[i], v[i], biases[i, 0], options) for i in range(len(q))])


def _attend_in_float32(
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

    The causal mask is aligned to the bottom right, as in flash-attn. If a flash-attn package that supports
    this GPU is installed, its kernel is used instead of torch's.
    """
    kernel = _package_kernel()
    if kernel is None:
        # torch.nn.attention.varlen calls this operator, but takes much host time.
        return torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, max_q, max_k, 0.0, window is None, False, scale=scaling,
            window_size_left=-1 if window is None else window - 1, window_size_right=0,
        )[0]  # fmt: skip
    out = kernel(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
        softmax_scale=scaling, causal=True,
        **({} if window is None else {"window_size": (window - 1, 0)}),
    )  # fmt: skip
    return out[0] if isinstance(out, tuple) else out


@functools.cache
def _package_kernel() -> Callable[..., Tensor | tuple[Tensor, ...]] | None:
    """Returns the kernel of an installed package, or None."""
    major, _ = torch.cuda.get_device_capability()
    for name, min_capability in _PACKAGES:
        if major < min_capability:
            continue
        try:
            kernel = importlib.import_module(name).flash_attn_varlen_func
        except ModuleNotFoundError:
            continue
        except (ImportError, OSError, AttributeError) as error:  # built for another torch version
            logger.warning("%s is installed but cannot be used here: %s", name, error)
            continue
        logger.info("attention over packed rows uses %s", name)
        return kernel
    return None


class Padding(NamedTuple):
    """The mapping between consecutive packed segments (N_s tokens) and the cells of a padded batch."""

    cells: Tensor  # [S, L] packed position of each cell; `start` where the cell is padding
    cell_indices: Tensor  # [N_s] flat index of each token's cell
    start: int  # packed position of the first token
    has_equal_lengths: bool  # whether no cell is padding, so that a view suffices

    @staticmethod
    def of(
        lengths: list[int], device: torch.device, *, start: int = 0, multiple: int = 1
    ) -> Padding:
        """Pads consecutive segments to their maximum length, rounded up to a multiple of `multiple`."""
        num_tokens = torch.tensor(lengths)
        width = -(-max(int(num_tokens.max()), 1) // multiple) * multiple
        starts = start + num_tokens.cumsum(0) - num_tokens
        offset = torch.arange(width)
        is_token = offset < num_tokens[:, None]
        cells = torch.where(is_token, starts[:, None] + offset, start)
        cell_indices = is_token.flatten().nonzero().flatten()
        cells, cell_indices = (to_device(x, device) for x in (cells, cell_indices))
        return Padding(cells, cell_indices, start, bool((num_tokens == width).all()))

    def pad(self, x: Tensor) -> Tensor:  # [N, H, D] -> [S, H, L, D]
        segments, width = self.cells.shape
        if self.has_equal_lengths:
            rows = x[self.start : self.start + segments * width]
        else:
            rows = x.index_select(0, self.cells.flatten())
        return rows.view(segments, width, *x.shape[1:]).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:  # [S, H, L, D] -> [N_s, H, D]
        rows = x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])
        return rows if self.has_equal_lengths else rows.index_select(0, self.cell_indices)


@dataclass(frozen=True)
class VarlenIndices:
    """Sequence offsets of all segments; the keys of a child are copies of its root's keys, then its own."""

    cu_queries: Tensor  # [S + 1] int32, cumulative number of queries
    cu_keys: Tensor  # [S + 1] int32, cumulative number of keys
    max_queries: int
    max_keys: int
    source: Tensor | None = None  # [M] packed position of each key; None if no key is copied
    key_order: Tensor | None = None  # [M] argsort of `source`: key indices grouped by token
    token_offsets: Tensor | None = None  # [N + 1] start of each token's group in `key_order`

    @staticmethod
    def build(
        root_lengths: list[int], children: list[tuple[int, int]], device: torch.device
    ) -> VarlenIndices:
        """`children` has the index of the root and the length of each child."""
        root_sizes = np.array(root_lengths)
        root_starts = np.cumsum(root_sizes) - root_sizes
        roots = np.array([root for root, n in children if n], np.int64)
        child_lengths = np.array([n for _, n in children if n], np.int64)
        num_queries = np.concatenate([root_sizes, child_lengths])
        num_keys = np.concatenate([root_sizes, root_sizes[roots] + child_lengths])
        cu_queries, cu_keys = (_to_int32(_cumulative(n), device) for n in (num_queries, num_keys))
        counts = VarlenIndices(cu_queries, cu_keys, int(num_queries.max()), int(num_keys.max()))
        if not len(child_lengths):
            return counts
        child_starts = root_sizes.sum() + np.cumsum(child_lengths) - child_lengths
        key_positions = [np.arange(root_sizes.sum())]
        for root, start, length in zip(roots, child_starts, child_lengths, strict=True):
            key_positions.append(root_starts[root] + np.arange(root_sizes[root]))
            key_positions.append(start + np.arange(length))
        source = np.concatenate(key_positions)
        token_offsets = _cumulative(np.bincount(source, minlength=num_queries.sum()))
        return replace(
            counts,
            source=_to_int32(source, device),
            key_order=_to_int32(np.argsort(source, kind="stable"), device),
            token_offsets=_to_int32(token_offsets, device),
        )

    def repeat(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and values [M, KV, D] of all segments, from those of each token [N, KV, D]."""
        if self.source is None:
            return k, v
        return _RepeatKeys.apply(k, v, self.source, self.key_order, self.token_offsets)


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _to_int32(values: np.ndarray, device: torch.device) -> Tensor:
    return to_device(torch.from_numpy(values.astype(np.int32)), device)


class _RepeatKeys(torch.autograd.Function):
    """Copies keys and values; the gradients of all copies are summed in float32, in a fixed order."""

    @staticmethod
    def forward(
        ctx: Context, k: Tensor, v: Tensor, source: Tensor, key_order: Tensor, token_offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(source, key_order, token_offsets)
        if not k.is_cuda:
            return k[source], v[source]
        from hone.ops.training_triton import gather

        return gather(k.contiguous(), v.contiguous(), source)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        source, key_order, token_offsets = ctx.saved_tensors
        if not grads[0].is_cuda:
            sums = (sum_copies_plain(g, source, len(token_offsets) - 1) for g in grads)
            return *sums, None, None, None
        from hone.ops.training_triton import sum_copies

        g_k, g_v = (g.contiguous() for g in grads)
        return (*sum_copies(g_k, g_v, key_order, token_offsets), None, None, None)


def sum_copies_plain(g: Tensor, source: Tensor, tokens: int) -> Tensor:
    """Returns the gradient of each token's key (or value), summed over its copies with torch operations."""
    sum_dtype = torch.float32 if g.itemsize < 4 else g.dtype
    total = g.new_zeros(tokens, *g.shape[1:], dtype=sum_dtype)
    return total.index_add_(0, source, g.to(sum_dtype)).to(g.dtype)


@dataclass
class SegmentLayout:
    """The attention layout of packed rows: first the roots, then their children."""

    root_lengths: list[int]
    children: list[tuple[int, int]]
    """For each child, the index of its root and its length."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _biases: dict[tuple[int | None, torch.dtype], tuple[Tensor | None, Tensor | None]] = field(
        default_factory=dict
    )
    """The attention biases of roots and of children, by window and dtype; layers share them."""

    def to(self, device: torch.device) -> SegmentLayout:
        return SegmentLayout(self.root_lengths, self.children, device)

    @cached_property
    def _varlen_indices(self) -> VarlenIndices:
        return VarlenIndices.build(self.root_lengths, self.children, self.device)

    @cached_property
    def _roots(self) -> Padding:
        return Padding.of(self.root_lengths, self.device)

    @cached_property
    def _children(self) -> Padding | None:
        lengths = [n for _, n in self.children]
        if not any(lengths):  # the last token of a response is no input, so it is not packed
            return None
        return Padding.of(lengths, self.device, start=sum(self.root_lengths))

    @cached_property
    def _root_indices(self) -> Tensor:  # [C] index of each child's root
        return to_device(torch.tensor([root for root, _ in self.children]), self.device)

    @cached_property
    def _child_keys(self) -> Tensor:  # [C, P + R] packed positions that each child attends to
        assert self._children is not None
        return torch.cat([self._roots.cells[self._root_indices], self._children.cells], 1)

    def attend(
        self,
        q: Tensor,  # [N, H, D]
        k: Tensor,  # [N, KV, D]
        v: Tensor,  # [N, KV, D]
        options: AttentionOptions,
    ) -> Tensor:  # [N, H, D]
        if fits_varlen(q) and not options.needs_scores:
            indices = self._varlen_indices
            return varlen_attention(
                q, *indices.repeat(k, v), indices.cu_queries, indices.cu_keys, indices.max_queries,
                indices.max_keys, scaling=options.scaling, window=options.window,
            )  # fmt: skip
        k, v = repeat_heads(q, k, v)
        roots, children, bias_key = self._roots, self._children, (options.window, q.dtype)
        if bias_key not in self._biases:
            child_bias = None if children is None else self._child_bias(children, *bias_key)
            self._biases[bias_key] = self._root_bias(*bias_key), child_bias
        root_bias, child_bias = self._biases[bias_key]
        root_q, root_k, root_v = (roots.pad(x) for x in (q, k, v))
        out = roots.unpad(padded_attention(root_q, root_k, root_v, root_bias, options))
        if children is None:
            return out
        keys = self._child_keys
        k, v = (
            x.index_select(0, keys.flatten()).view(*keys.shape, *x.shape[1:]).transpose(1, 2)
            for x in (k, v)
        )
        child_out = padded_attention(children.pad(q), k, v, child_bias, options)
        return torch.cat([out, children.unpad(child_out)])

    def _root_bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:  # [P, P]
        width = self._roots.cells.shape[1]
        if window is None or window >= width:
            return None  # causal
        position = torch.arange(width, device=self.device)
        return as_bias(is_visible(position[:, None] - position, window), dtype)

    def _child_bias(self, children: Padding, window: int | None, dtype: torch.dtype) -> Tensor:
        """Returns [C, 1, R, P + R]: each child attends to its whole root and causally to itself.

        Padding queries attend to keys too, because the softmax of a fully masked row is NaN.
        """
        width = children.cells.shape[1]
        root_lengths = to_device(torch.tensor(self.root_lengths), self.device)[self._root_indices]
        own_offset = torch.arange(width, device=self.device)
        root_offset = torch.arange(self._roots.cells.shape[1], device=self.device)
        sees_root = (root_offset < root_lengths[:, None])[:, None, :].expand(-1, width, -1)
        sees_own = is_visible(own_offset[:, None] - own_offset, window)
        if window is not None:
            position = root_lengths[:, None] + own_offset  # [C, R]
            sees_root = sees_root & (position[:, :, None] - root_offset < window)
        sees_own = sees_own.expand(len(root_lengths), -1, -1)
        return as_bias(torch.cat([sees_root, sees_own], -1), dtype)[:, None]
