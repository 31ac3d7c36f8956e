"""SAPO (2511.20347): a smooth gate in place of the hard clip."""

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


def soft_gate(tokens: Tokens) -> tuple[Tensor, Columns]:
    """−A·σ(τ(r−1))·4/τ; τ is larger where the advantage is not positive, so trust fades faster."""
    positive, negative = tokens.setting("tau_pos"), tokens.setting("tau_neg")
    if positive <= 0 or negative <= 0:
        raise ValueError(f"sapo: tau_pos={positive} and tau_neg={negative} must both be above 0")
    log_ratio = clipped_log_ratio(tokens)
    ratio = log_ratio.exp()
    tau = torch.full_like(ratio, negative).masked_fill(tokens.advantages > 0, positive)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return -tokens.advantages * gate, standard_metrics(tokens, log_ratio=log_ratio)


sapo = PolicyLoss("sapo", soft_gate, agg_mode="seq-mean-token-mean")
