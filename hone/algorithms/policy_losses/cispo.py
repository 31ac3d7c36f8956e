"""CISPO (2506.13585): the clipped ratio is a constant weight, so no token loses its gradient."""

from __future__ import annotations

from torch import Tensor

from hone.algorithms.policy_losses.policy_loss import (
    Columns,
    PolicyLoss,
    Tokens,
    clipped_log_ratio,
    standard_metrics,
)


def clipped_weight(tokens: Tokens) -> tuple[Tensor, Columns]:
    """−sg(clip(r))·A·log π. Tokens clipped on either side count in pg_clipfrac."""
    low, high = tokens.clip_bounds()
    log_ratio = clipped_log_ratio(tokens).detach()
    ratio = log_ratio.exp()
    weight = ratio.clamp(1 - low, 1 + high)
    loss = -weight * tokens.advantages * tokens.log_prob
    return loss, standard_metrics(tokens, ratio != weight, log_ratio=log_ratio)


cispo = PolicyLoss("cispo", clipped_weight)
