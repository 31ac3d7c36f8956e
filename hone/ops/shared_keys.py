"""Repeats the keys and values of shared prompts before each response, for variable-length kernels.

Queries of a prompt are computed once for all of its responses. The gradients of the copies of keys
and values are summed in float32, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.ops.autograd import Context
from hone.ops.device import send


@dataclass(frozen=True)
class SharedKeys:
    """The numbers of queries and keys per segment; a child has the keys of its root and then its own."""

    cu_queries: Tensor  # [S + 1] int32, cumulative number of queries
    cu_keys: Tensor  # [S + 1] int32, cumulative number of keys
    max_queries: int
    max_keys: int
    source: Tensor | None = None  # [M] packed position of each of M keys; None if no key is copied
    copy_indices: Tensor | None = None  # [M] indices of the copies, sorted by packed position
    first_copy: Tensor | None = None  # [N + 1] where each token's copies begin in `copy_indices`

    @staticmethod
    def build(
        root_lengths: list[int], children: list[tuple[int, int]], device: torch.device
    ) -> SharedKeys:
        root_sizes = np.array(root_lengths)
        root_starts = np.cumsum(root_sizes) - root_sizes
        parents = np.array([parent for parent, n in children if n], np.int64)
        child_lengths = np.array([n for _, n in children if n], np.int64)
        num_queries = np.concatenate([root_sizes, child_lengths])
        num_keys = np.concatenate([root_sizes, root_sizes[parents] + child_lengths])
        query_and_key_counts = (
            _to_device(_cumulative(num_queries), device),
            _to_device(_cumulative(num_keys), device),
            int(num_queries.max()),
            int(num_keys.max()),
        )
        if not len(child_lengths):
            return SharedKeys(*query_and_key_counts)
        child_starts = root_sizes.sum() + np.cumsum(child_lengths) - child_lengths
        key_positions = [np.arange(root_sizes.sum())]
        for parent, start, length in zip(parents, child_starts, child_lengths, strict=True):
            key_positions.append(
                np.arange(root_starts[parent], root_starts[parent] + root_sizes[parent])
            )
            key_positions.append(np.arange(start, start + length))
        source = np.concatenate(key_positions)
        first_copy = _cumulative(np.bincount(source, minlength=num_queries.sum()))
        index_arrays = (source, np.argsort(source, kind="stable"), first_copy)
        indices = (_to_device(index, device) for index in index_arrays)
        return SharedKeys(*query_and_key_counts, *indices)

    def repeat(
        self, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:  # [N, KV, D] each -> [M, KV, D]
        if self.source is None:
            return k, v
        return _RepeatKeys.apply(k, v, self.source, self.copy_indices, self.first_copy)


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    return send(torch.from_numpy(values.astype(np.int32)), device)


class _RepeatKeys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, k: Tensor, v: Tensor, source: Tensor, copy_indices: Tensor, first_copy: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(source, copy_indices, first_copy)
        if not k.is_cuda:
            return k[source], v[source]
        from hone.ops.shared_keys_triton import gather

        return gather(k.contiguous(), v.contiguous(), source)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        source, copy_indices, first_copy = ctx.saved_tensors
        if not grads[0].is_cuda:
            return (
                *(sum_copies_plain(g, source, len(first_copy) - 1) for g in grads),
                None,
                None,
                None,
            )
        from hone.ops.shared_keys_triton import sum_copies

        g_k, g_v = (g.contiguous() for g in grads)
        return (*sum_copies(g_k, g_v, copy_indices, first_copy), None, None, None)


def sum_copies_plain(g: Tensor, source: Tensor, tokens: int) -> Tensor:
    """Returns the gradient of each token's key (or value), summed over its copies, in plain torch."""
    sum_dtype = torch.float32 if g.itemsize < 4 else g.dtype
    total = g.new_zeros(tokens, *g.shape[1:], dtype=sum_dtype)
    return total.index_add_(0, source, g.to(sum_dtype)).to(g.dtype)
