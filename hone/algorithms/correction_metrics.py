"""Metrics of rollout/training agreement, importance weights and rejection.

Names and quantities are verl's, without the prefix `rollout_corr/`; rows without a policy token are
ignored. Nothing here changes training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hone.algorithms.rejection import EXPONENT_BOUND, RejectionResult
from hone.ops.masked import masked_mean, masked_sum, masked_var, zero_outside_mask

Metrics = dict[str, Tensor]


def gap_metrics(trainer: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Metrics, Metrics]:
    """Returns (means, maxima) of the per-token gap between rollout and trainer log-probs."""
    mask = mask.bool()
    gap = zero_outside_mask(trainer - rollout, mask)
    means = {"kl": -masked_mean(gap, mask), "log_prob_abs_diff_mean": masked_mean(gap.abs(), mask)}
    return means, {"log_prob_abs_diff_max": gap.abs().max() if gap.numel() else gap.new_zeros(())}


def agreement_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """Returns metrics of the gap between rollout and trainer log-probs; perplexities are row means."""
    log_ratio = old - rollout
    rows = mask.any(-1)
    train_log_ppl, rollout_log_ppl = (-masked_mean(x, mask, -1) for x in (old, rollout))
    difference = train_log_ppl - rollout_log_ppl  # [B]
    per_row = masked_sum(log_ratio, mask, -1)
    return {
        "kl": gap_metrics(old, rollout, mask)[0]["kl"],
        "k3_kl": masked_mean(_exp(log_ratio) - log_ratio - 1, mask),
        "training_ppl": masked_mean(_exp(train_log_ppl), rows),
        "training_log_ppl": masked_mean(train_log_ppl, rows),
        "rollout_ppl": masked_mean(_exp(rollout_log_ppl), rows),
        "rollout_log_ppl": masked_mean(rollout_log_ppl, rows),
        "log_ppl_diff": masked_mean(difference, rows),
        "log_ppl_abs_diff": masked_mean(difference.abs(), rows),
        "log_ppl_diff_max": _masked_max(difference, rows),
        "log_ppl_diff_min": -_masked_max(-difference, rows),
        "ppl_ratio": masked_mean(_exp(difference), rows),
        "chi2_token": masked_mean(_exp(log_ratio) ** 2, mask) - 1,
        "chi2_seq": masked_mean(_exp(per_row) ** 2, rows) - 1,
    }


def weight_metrics(
    weights: Tensor, log_ratio: Tensor, mask: Tensor, level: str, bounds: tuple[float, ...]
) -> Metrics:
    """Returns metrics of the applied weights; the fractions count ratios that were out of bounds.

    For sequence weights, the maximum and minimum are those of the ratios before truncation.
    """
    low, high = (1 / bounds[0], bounds[0]) if len(bounds) == 1 else bounds
    rows = mask.any(-1)
    squares = masked_mean(weights**2, mask)
    ratio, scope = _exp(log_ratio), mask
    if level == "sequence":
        per_row = masked_sum(log_ratio, mask, -1)
        ratio, scope = _exp(per_row), rows
        extremes = {"_max": _masked_max(ratio, rows), "_min": (-_masked_max(-per_row, rows)).exp()}
    else:
        extremes = {"_max": _masked_max(weights, mask), "_min": -_masked_max(-weights, mask)}
    ratio_per_row = ratio if level == "sequence" else masked_mean(ratio, mask, -1)
    weight_per_row = masked_mean(weights, mask, -1)
    metrics = {
        "rollout_is_mean": masked_mean(weights, mask),
        "rollout_is_std": masked_var(weights, mask, unbiased=False).sqrt(),
        **{f"rollout_is{key}": _zero_if_empty(rows, value) for key, value in extremes.items()},
        "rollout_is_eff_sample_size": masked_mean(weights, mask) ** 2
        / torch.where(squares > 0, squares, 1),
        "rollout_is_ratio_fraction_high": _fraction(ratio > high, scope),
        "rollout_is_ratio_fraction_low": _fraction(ratio < low, scope),
        **_summary("rollout_is_seq", weight_per_row, rows),
        "rollout_is_seq_max_deviation": _masked_max((weight_per_row - 1).abs(), rows),
        "rollout_is_seq_fraction_high": _fraction(ratio_per_row > high, rows),
        "rollout_is_seq_fraction_low": _fraction(ratio_per_row < low, rows),
    }
    if len(bounds) == 2:  # IcePop
        per_token = ratio.unsqueeze(-1).expand_as(mask) if level == "sequence" else ratio
        metrics["rollout_is_oob_ratio"] = _fraction((per_token < low) | (per_token > high), mask)
    return metrics


def rejection_metrics(
    results: Mapping[str, RejectionResult], keep: Tensor, mask: Tensor
) -> Metrics:
    """Returns each option's values and rejection rate, and the rejection rate of all together."""
    metrics = _rejection_rates("rollout_rs", keep, mask)
    rows = mask.any(-1)
    for option, result in results.items():
        name = f"rollout_rs_{option}"
        values, low, high = result.values, result.low, result.high
        scope = mask if values.dim() == 2 else rows
        tokens = values if values.dim() == 2 else values.unsqueeze(-1).expand_as(mask)
        per_row = masked_mean(values, mask, -1) if values.dim() == 2 else values
        bounded = tokens.clamp(low if math.isfinite(low) else 0.0, high)
        metrics |= {
            **_summary(name, tokens, mask),
            f"{name}_std": masked_var(bounded, mask, unbiased=False).sqrt(),
            f"{name}_fraction_high": _fraction(values > high, scope),
            f"{name}_fraction_low": _fraction(values < low, scope),
            **_summary(f"{name}_seq", per_row, rows),
            f"{name}_seq_max_deviation": _masked_max(per_row.abs(), rows),
            f"{name}_seq_fraction_high": _fraction(per_row > high, rows),
            f"{name}_seq_fraction_low": _fraction(per_row < low, rows),
            **_rejection_rates(name, result.keep, mask),
        }
    return metrics


def _rejection_rates(name: str, keep: Tensor, mask: Tensor) -> Metrics:
    """Returns the share of rejected tokens, and of rows with at least one."""
    rejected = mask & ~keep
    return {
        f"{name}_masked_fraction": _fraction(rejected, mask),
        f"{name}_seq_masked_fraction": _fraction(rejected.any(-1), mask.any(-1)),
    }


def _summary(name: str, values: Tensor, mask: Tensor) -> Metrics:
    return {
        f"{name}_mean": masked_mean(values, mask),
        f"{name}_std": masked_var(values, mask).sqrt(),
        f"{name}_max": _masked_max(values, mask),
        f"{name}_min": -_masked_max(-values, mask),
    }


def _exp(x: Tensor) -> Tensor:
    """Returns exp(x), bounded so that it is always finite."""
    return x.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def _zero_if_empty(rows: Tensor, value: Tensor) -> Tensor:
    return value if rows.any() else torch.zeros_like(value)


def _fraction(flags: Tensor, mask: Tensor) -> Tensor:
    """Returns the fraction of the mask where the flag is set."""
    return masked_mean(flags.double(), mask)


def _masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the maximum over the mask; 0 if the mask is empty."""
    if not mask.any():
        return values.new_zeros(())
    return torch.where(mask, values, -torch.inf).amax()
