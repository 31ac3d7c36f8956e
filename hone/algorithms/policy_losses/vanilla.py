"""PPO's clipped surrogate with dual clip (1707.06347; dual clip 1912.09729)."""

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


def ppo_clip(tokens: Tokens) -> tuple[Tensor, Columns]:
    """max(−A·r, −A·clip(r)); for A < 0 at most −A·c."""
    low, high = tokens.clip_bounds()
    dual_clip = tokens.setting("clip_ratio_c")
    if dual_clip <= 1:
        raise ValueError(
            f"clip_ratio_c={dual_clip} must be above 1: "
            "it bounds the ratio where the advantage is negative"
        )
    advantages = tokens.advantages
    log_ratio = clipped_log_ratio(tokens)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    ppo_loss = torch.maximum(unclipped, clipped)
    ceiling = -advantages * dual_clip
    is_negative = advantages < 0
    loss = torch.where(is_negative, torch.minimum(ceiling, ppo_loss), ppo_loss)
    dual_clipped = (ppo_loss > ceiling) & is_negative
    return loss, standard_metrics(tokens, clipped > unclipped, dual_clipped, log_ratio)


vanilla = PolicyLoss("vanilla", ppo_clip)
