"""Losses that clip one ratio per sequence: GSPO (2507.18071), LUSPO (2602.05261), GMPO (2507.20673)."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.policy_losses.policy_loss import (
    NamedTensors,
    PolicyLoss,
    Tokens,
    bounded_log_ratio,
    standard_metrics,
)
from hone.ops.masked import masked_mean

_EXPONENT_CEILING = 10.0


def sequence_clip_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """max(−A·s, −A·clip(s)), s = exp(mean log-ratio); the gradient at a token is that of its own log π."""
    low, high = tokens.clip_bounds()
    mean_log_ratio = masked_mean(tokens.log_ratio, tokens.mask, -1).unsqueeze(-1).detach()
    log_ratio = tokens.log_prob - tokens.log_prob.detach() + mean_log_ratio
    ratio = log_ratio.clamp(max=_EXPONENT_CEILING).exp()
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), standard_metrics(tokens, clipped > unclipped)


def geometric_mean_loss(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """−mean(A)·exp(mean log-ratio), where log-ratios are clipped above if A > 0 and below if A < 0.

    pg_clipfrac counts tokens with A > 0 outside of either bound, pg_clipfrac_lower those with A < 0.
    """
    low, high = tokens.clip_bounds()
    sign = tokens.advantages.sign()
    log_ratio = bounded_log_ratio(tokens)
    clipped_log_ratio = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-low, high))
    ratio = masked_mean(clipped_log_ratio, tokens.mask, -1).exp()
    loss = -masked_mean(tokens.advantages, tokens.mask, -1) * ratio
    if tokens.weights is not None:
        log_weights = torch.where(tokens.mask, tokens.weights, torch.ones_like(loss[:, None])).log()
        loss = loss * masked_mean(log_weights, tokens.mask, -1).exp()
    is_outside = (log_ratio > high) | (log_ratio < -low)
    metrics = standard_metrics(tokens, is_outside & (sign > 0), is_outside & (sign < 0))
    return loss.unsqueeze(-1).expand_as(log_ratio), metrics


gspo = PolicyLoss("gspo", sequence_clip_loss, default_agg_mode="seq-mean-token-mean")
luspo = PolicyLoss("luspo", sequence_clip_loss, agg_mode="seq-mean-token-sum")
geo_mean = PolicyLoss(
    "geo_mean", geometric_mean_loss, agg_mode="seq-mean-token-mean", applies_weights=True
)
