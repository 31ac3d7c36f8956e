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
from hone.ops.transfer import send


@dataclass(frozen=True)
class SharedKeys:
    """Query and key lengths per segment: roots, then children with their root's keys first."""

    cu_queries: Tensor  # [S + 1] int32
    cu_keys: Tensor  # [S + 1] int32
    longest_query: int
    longest_keys: int
    source: Tensor | None = None  # [M] packed position of each key; None: no copies
    uses: Tensor | None = None  # [M] key indices, sorted by packed position
    first_use: Tensor | None = None  # [N + 1] start of each token in `uses`

    @staticmethod
    def build(
        root_lengths: list[int], children: list[tuple[int, int]], device: torch.device
    ) -> SharedKeys:
        roots = np.array(root_lengths)
        root_starts = np.cumsum(roots) - roots
        parents = np.array([p for p, n in children if n], np.int64)
        child_lengths = np.array([n for _, n in children if n], np.int64)
        queries = np.concatenate([roots, child_lengths])
        keys = np.concatenate([roots, roots[parents] + child_lengths])
        lengths = (
            _to_device(_cumulative(queries), device),
            _to_device(_cumulative(keys), device),
            int(queries.max()),
            int(keys.max()),
        )
        if not len(child_lengths):
            return SharedKeys(*lengths)
        child_starts = roots.sum() + np.cumsum(child_lengths) - child_lengths
        key_positions = [np.arange(roots.sum())]
        for p, start, length in zip(parents, child_starts, child_lengths, strict=True):
            key_positions.append(np.arange(root_starts[p], root_starts[p] + roots[p]))
            key_positions.append(np.arange(start, start + length))
        source = np.concatenate(key_positions)
        first_use = _cumulative(np.bincount(source, minlength=queries.sum()))
        indices = (source, np.argsort(source, kind="stable"), first_use)
        return SharedKeys(*lengths, *(_to_device(index, device) for index in indices))

    def repeat(
        self, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:  # [N, KV, D] each -> [M, KV, D]
        if self.source is None:
            return k, v
        return _RepeatKeys.apply(k, v, self.source, self.uses, self.first_use)


def _cumulative(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _to_device(values: np.ndarray, device: torch.device) -> Tensor:
    return send(torch.from_numpy(values.astype(np.int32)), device)


class _RepeatKeys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, k: Tensor, v: Tensor, source: Tensor, uses: Tensor, first_use: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(source, uses, first_use)
        if not k.is_cuda:
            return k[source], v[source]
        from hone.ops.shared_keys_triton import gather

        return gather(k.contiguous(), v.contiguous(), source)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        source, uses, first_use = ctx.saved_tensors
        if not grads[0].is_cuda:
            return (*(plain_sum(g, source, len(first_use) - 1) for g in grads), None, None, None)
        from hone.ops.shared_keys_triton import sum_uses

        g_k, g_v = (g.contiguous() for g in grads)
        return (*sum_uses(g_k, g_v, uses, first_use), None, None, None)


def plain_sum(g: Tensor, source: Tensor, tokens: int) -> Tensor:
    """Returns the gradient per token, summed over the copies of its key."""
    sum_dtype = torch.float32 if g.itemsize < 4 else g.dtype
    total = g.new_zeros(tokens, *g.shape[1:], dtype=sum_dtype)
    return total.index_add_(0, source, g.to(sum_dtype)).to(g.dtype)
