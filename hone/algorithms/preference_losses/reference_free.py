"""Losses over pairs without a reference: SimPO, ORPO and CPO. All tensors are [N], one number per pair."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.algorithms.preference_losses import LossAndMetrics
from hone.config.preference import PreferenceLossConfig


def simpo(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    margin: Tensor,
    config: PreferenceLossConfig,
) -> LossAndMetrics:
    """SimPO (arXiv 2405.14734, eq. 6): −log σ(β·(difference of log-probabilities per token) − γ − margin)."""
    chosen, rejected = chosen_logp / chosen_length, rejected_logp / rejected_length
    losses = F.softplus(config.simpo_gamma + margin - config.beta * (chosen - rejected))
    return losses, _rewards(chosen, rejected, config)


def orpo(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    chosen_length: Tensor,
    rejected_length: Tensor,
    config: PreferenceLossConfig,
) -> LossAndMetrics:
    """ORPO (arXiv 2403.07691, eq. 6 and 7): NLL of the chosen response − β·log σ(log odds ratio).

    The odds are p / (1 − p), with p = exp(log-probability per token).
    """
    chosen, rejected = chosen_logp / chosen_length, rejected_logp / rejected_length
    log_odds_ratio = (chosen - _log1mexp(chosen)) - (rejected - _log1mexp(rejected))
    losses = -chosen + config.beta * F.softplus(-log_odds_ratio)
    metrics = {"nll": -chosen, "log_odds_ratio": log_odds_ratio}
    return losses, metrics | _rewards(chosen, rejected, config)


def cpo(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    chosen_length: Tensor,
    margin: Tensor,
    config: PreferenceLossConfig,
) -> LossAndMetrics:
    """CPO (arXiv 2401.08417): DPO against a uniform reference, plus α·NLL of the chosen response."""
    nll = -chosen_logp / chosen_length
    losses = F.softplus(margin - config.beta * (chosen_logp - rejected_logp))
    metrics = {"nll": nll} | _rewards(chosen_logp, rejected_logp, config)
    return losses + config.cpo_alpha * nll, metrics


def _log1mexp(log_p: Tensor) -> Tensor:
    """Returns log(1 − exp(log_p)) for log_p < 0; near 0 and far from it, it loses no digits."""
    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).tiny)  # p = 1 has infinite odds
    is_near_zero = log_p > -0.6931471805599453
    # Both branches are computed, so that each gets a value without an infinite gradient.
    near = torch.log(-torch.expm1(torch.where(is_near_zero, log_p, -0.5)))
    far = torch.log1p(-torch.exp(torch.where(is_near_zero, -1.0, log_p)))
    return torch.where(is_near_zero, near, far)


def _rewards(chosen: Tensor, rejected: Tensor, config: PreferenceLossConfig) -> dict[str, Tensor]:
    """Returns the implicit rewards of log-probabilities."""
    return {"rewards/chosen": config.beta * chosen, "rewards/rejected": config.beta * rejected}
