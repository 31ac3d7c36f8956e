"""Attention with its scores at hand: for soft-capped scores and attention sinks, which fused kernels lack.

One sequence at a time, in float32; on the way back the scores are computed again, so that only one
sequence's are ever alive.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def scored_attention(
    q: Tensor,  # [B, H, L, D]
    k: Tensor,  # [B, H, M, D]
    v: Tensor,  # [B, H, M, D]
    bias: Tensor | None,  # [L, M] or [B, 1, L, M], -inf where a key is not seen; None: causal
    *,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,  # [H]
) -> Tensor:  # [B, H, L, D]
    """softmax(softcap(q · kᵀ) + bias) · v, a sink taking its part of every query's weights."""
    if bias is None:
        bias = q.new_full((q.shape[2], k.shape[2]), float("-inf")).triu(1)
    rows = [bias if bias.dim() == 2 else bias[i, 0] for i in range(len(q))]
    keeps_gradient = torch.is_grad_enabled() and q.requires_grad
    out = []
    for i, seen in enumerate(rows):
        given = (q[i], k[i], v[i], seen, scaling, softcap, sinks)
        out.append(
            checkpoint(_attend, *given, use_reentrant=False) if keeps_gradient else _attend(*given)
        )
    return torch.stack(out)


def _attend(
    q: Tensor,  # [H, L, D]
    k: Tensor,
    v: Tensor,
    bias: Tensor,  # [L, M]
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    scores = cap(torch.matmul(q.float(), k.float().transpose(1, 2)) * scaling, softcap)
    weights = weigh(scores + bias, None if sinks is None else sinks[:, None, None])
    return torch.matmul(weights.to(v.dtype), v)


def cap(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores squashed into (-softcap, softcap)."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def weigh(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension, with one key more where there are sinks, whose value is 0."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
