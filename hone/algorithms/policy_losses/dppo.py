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
    """−A·sg(min(r, c))·log π on the kept tokens."""
    ratio = clipped_log_ratio(tokens).exp().clamp(max=tokens.setting("clip_ratio_c")).detach()
    loss = torch.where(keep, -tokens.advantages * ratio * tokens.log_prob, 0.0)
    dropped, rising = ~keep, tokens.advantages > 0
    return loss, standard_metrics(tokens, dropped & rising, dropped & ~rising)


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
