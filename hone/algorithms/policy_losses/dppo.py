"""DPPO (2602.04879): drop a token when its probability, not its ratio, has moved too far.

A ratio of 10 on a token of probability 1e-6 is no movement at all; a clip on ratios cannot see that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.policy_losses.policy_loss import (
    Columns,
    PolicyLoss,
    Tokens,
    clipped_log_ratio,
    standard_metrics,
)

_TINY = 1e-8


def _masked_gradient(tokens: Tokens, keep: Tensor) -> tuple[Tensor, Columns]:
    """−A·sg(min(r, c))·log π on the kept tokens.

    pg_clipfrac counts the dropped tokens, pg_clipfrac_lower the kept ones whose ratio was cut at c.
    """
    log_ratio = clipped_log_ratio(tokens).detach()
    ratio, ceiling = log_ratio.exp(), tokens.setting("clip_ratio_c")
    loss = -tokens.advantages * ratio.clamp(max=ceiling) * tokens.log_prob
    loss = torch.where(keep, loss, 0.0)
    return loss, standard_metrics(tokens, ~keep, keep & (ratio > ceiling), log_ratio)


def total_variation(tokens: Tokens) -> tuple[Tensor, Columns]:
    """Keep while π − π_old ≤ high where A > 0, ≥ −low elsewhere."""
    low, high = tokens.clip_bounds()
    moved = tokens.log_prob.detach().exp() - tokens.old_log_prob.exp()
    keep = torch.where(tokens.advantages > 0, moved <= high, moved >= -low)
    return _masked_gradient(tokens, keep)


def binary_kl(tokens: Tokens) -> tuple[Tensor, Columns]:
    """Keep while KL of (π_old, 1−π_old) from (π, 1−π) is in bounds, or the token moves back."""
    low, high = tokens.clip_bounds()
    new = tokens.log_prob.detach().exp()
    old = tokens.old_log_prob.exp()
    stay_old, stay_new = (1 - old).clamp(min=_TINY), (1 - new).clamp(min=_TINY)
    divergence = -old * tokens.log_ratio.detach() + stay_old * (stay_old / stay_new).log()
    keep = torch.where(
        tokens.advantages > 0,
        (divergence <= high) | (new <= old),
        (divergence <= low) | (new >= old),
    )
    return _masked_gradient(tokens, keep)


dppo_tv = PolicyLoss("dppo_tv", total_variation)
dppo_kl = PolicyLoss("dppo_kl", binary_kl)
