"""Attention over padded sequences, and functions that all attention layouts share.

Fused kernels do not support soft caps and sinks. Attention with these is computed in float32, one
sequence at a time, and the backward pass recomputes the scores, so that only the scores of one
sequence are in memory.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class AttentionOptions(NamedTuple):
    """The attention options of one layer."""

    layer: int  # index of the layer
    scaling: float  # of the scores
    window: int | None = None  # of sliding-window attention
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]

    @property
    def needs_scores(self) -> bool:
        """Whether the scores must be computed, because fused kernels do not support the options."""
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
    sink_column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink_column], -1), -1)[..., :-1]


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
