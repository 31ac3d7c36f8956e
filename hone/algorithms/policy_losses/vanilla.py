"""PPO's clipped surrogate with dual clip (1707.06347; dual clip 1912.09729)."""

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


def ppo_clip(tokens: Tokens) -> tuple[Tensor, NamedTensors]:
    """max(−A·r, −A·clip(r)), at most −A·clip_ratio_c if A < 0 (dual clip); r = π/π_old."""
    low, high = tokens.clip_bounds()
    max_ratio = tokens.setting("clip_ratio_c")
    if max_ratio <= 1:
        raise ValueError(
            f"clip_ratio_c={max_ratio} must be above 1: "
            "it bounds the ratio where the advantage is negative"
        )
    advantages = tokens.advantages
    log_ratio = bounded_log_ratio(tokens)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    ppo_loss = torch.maximum(unclipped, clipped)
    max_loss = -advantages * max_ratio
    is_negative = advantages < 0
    loss = torch.where(is_negative, torch.minimum(max_loss, ppo_loss), ppo_loss)
    is_dual_clipped = (ppo_loss > max_loss) & is_negative
    return loss, standard_metrics(tokens, clipped > unclipped, is_dual_clipped, log_ratio)


vanilla = PolicyLoss("vanilla", ppo_clip)
