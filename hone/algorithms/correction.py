"""Correction for rollout log-probs that differ from the trainer's.

Importance weights multiply the policy loss; rejection removes tokens from `loss_mask`. `response_mask`
(the policy's tokens) is never changed, because advantages, KL and metrics use it.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hone.algorithms.correction_metrics import agreement_metrics, rejection_metrics, weight_metrics
from hone.algorithms.rejection import EXPONENT_BOUND, catastrophic_tokens, rejection_mask
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.block import setting
from hone.config.ranges import IS_THRESHOLD_KEY, Bound, parse_bound
from hone.ops.masked import masked_mean, masked_sum, zero_outside_mask
from hone.types import Settings

_SECTION = "algorithm.rollout_correction"
_PREFIX = "rollout_corr/"


def correct(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: Settings | None = None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Returns (importance weights or None, the loss mask after rejection, `rollout_corr/…` metrics).

    `config` is algorithm.rollout_correction.
    """
    option = partial(setting, config, defaults=RolloutCorrectionConfig)
    mask = response_mask.bool()
    trainer, rollout = (
        zero_outside_mask(x.detach(), mask) for x in (old_log_probs, rollout_log_probs)
    )
    log_ratio = trainer - rollout
    metrics = agreement_metrics(trainer, rollout, mask)
    weights = None
    level, threshold = option("rollout_is"), option("rollout_is_threshold")
    if level is not None:
        weights = importance_weights(log_ratio, mask, level, threshold)
        bounds = parse_bound(threshold, IS_THRESHOLD_KEY)
        metrics |= weight_metrics(weights, log_ratio, mask, level, bounds)
        if option("rollout_is_batch_normalize"):
            mean = masked_mean(weights, mask)
            if level == "sequence":
                mean = masked_mean(masked_mean(weights, mask, -1), mask.any(-1))
            weights = weights / mean if mean > 0 else weights
            metrics["rollout_is_batch_norm_factor"] = mean
    keep_mask, results = rejection_mask(
        log_ratio, mask, option("rollout_rs"), option("rollout_rs_threshold")
    )
    if results:
        metrics |= rejection_metrics(results, keep_mask, mask)
    if (veto_threshold := option("rollout_token_veto_threshold")) is not None:
        is_catastrophic = catastrophic_tokens(log_ratio, mask, veto_threshold)
        is_vetoed = is_catastrophic.any(-1)  # [B]
        keep_mask = keep_mask & ~is_vetoed[:, None]
        metrics["rollout_is_veto_fraction"] = masked_mean(is_vetoed.float(), mask.any(-1))
        metrics["rollout_is_catastrophic_token_fraction"] = masked_mean(
            is_catastrophic.float(), mask
        )
    return (
        weights,
        response_mask * keep_mask,
        {_PREFIX + key: float(value) for key, value in metrics.items()},
    )


def importance_weights(log_ratio: Tensor, mask: Tensor, level: str, threshold: Bound) -> Tensor:
    """Returns [B, T] ratios train/rollout per token or per sequence, 0 outside the mask, without gradient.

    A single number truncates weights above it (TIS); "lo_hi" sets weights outside lo … hi to 0 (IcePop).
    """
    bounds = parse_bound(threshold, IS_THRESHOLD_KEY)
    log_ratio = zero_outside_mask(log_ratio, mask).detach()
    if level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, -1).unsqueeze(-1).expand_as(log_ratio)
    elif level != "token":
        raise ValueError(
            f"{_SECTION}.rollout_is={level!r} is unknown; use 'token', 'sequence' or null"
        )
    weights = zero_outside_mask(log_ratio.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp(), mask)
    if len(bounds) == 1:
        return weights.clamp(max=bounds[0])
    in_bounds = (weights >= bounds[0]) & (weights <= bounds[1])
    return torch.where(in_bounds, weights, 0.0)
