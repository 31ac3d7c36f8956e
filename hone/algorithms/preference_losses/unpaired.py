"""Losses over single responses with a label, true for a desirable response. All tensors are [N]."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.preference_losses import LossAndMetrics
from hone.config.preference import PreferenceLossConfig


def kto(
    logp: Tensor, ref_logp: Tensor, label: Tensor, kl: Tensor, config: PreferenceLossConfig
) -> LossAndMetrics:
    """KTO (arXiv 2402.01306, eq. 8): λ·(1 − σ(±β·(log-ratio − KL))), + if desirable, − if not.

    `kl` estimates KL(π‖π_ref) over the mini-batch, is not negative and has no gradient.
    """
    log_ratio = logp - ref_logp
    return _losses(log_ratio - kl, label, config), {"rewards": config.beta * log_ratio}


def apo_zero_unpaired(
    logp: Tensor, ref_logp: Tensor, label: Tensor, config: PreferenceLossConfig
) -> LossAndMetrics:
    """APO-zero without pairs (arXiv 2408.06266): KTO's loss with KL 0."""
    log_ratio = logp - ref_logp
    return _losses(log_ratio, label, config), {"rewards": config.beta * log_ratio}


def _losses(advantage: Tensor, label: Tensor, config: PreferenceLossConfig) -> Tensor:
    """Returns the weighted losses; the sign of an undesirable response is reversed."""
    is_desirable = label.bool()
    signed = torch.where(is_desirable, advantage, -advantage)
    weights = torch.where(is_desirable, config.desirable_weight, config.undesirable_weight)
    return weights * torch.sigmoid(-config.beta * signed)
