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
from hone.ops.masked import masked_mean, masked_sum, masked_var

Metrics = dict[str, Tensor]


def agreement_metrics(trainer: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """Returns metrics of the gap between rollout and trainer log-probs; perplexities are means over rows."""
    log_ratio = trainer - rollout
    row_mask = mask.any(-1)
    trainer_log_ppl, rollout_log_ppl = (-masked_mean(x, mask, -1) for x in (trainer, rollout))
    log_ppl_diff = trainer_log_ppl - rollout_log_ppl  # [B]
    row_log_ratio = masked_sum(log_ratio, mask, -1)
    return {
        "kl": -masked_mean(log_ratio, mask),
        "k3_kl": masked_mean(_bounded_exp(log_ratio) - log_ratio - 1, mask),
        "training_ppl": masked_mean(_bounded_exp(trainer_log_ppl), row_mask),
        "training_log_ppl": masked_mean(trainer_log_ppl, row_mask),
        "rollout_ppl": masked_mean(_bounded_exp(rollout_log_ppl), row_mask),
        "rollout_log_ppl": masked_mean(rollout_log_ppl, row_mask),
        "log_ppl_diff": masked_mean(log_ppl_diff, row_mask),
        "log_ppl_abs_diff": masked_mean(log_ppl_diff.abs(), row_mask),
        "log_ppl_diff_max": _masked_max(log_ppl_diff, row_mask),
        "log_ppl_diff_min": -_masked_max(-log_ppl_diff, row_mask),
        "ppl_ratio": masked_mean(_bounded_exp(log_ppl_diff), row_mask),
        "chi2_token": masked_mean(_bounded_exp(log_ratio) ** 2, mask) - 1,
        "chi2_seq": masked_mean(_bounded_exp(row_log_ratio) ** 2, row_mask) - 1,
    }


def weight_metrics(
    weights: Tensor, log_ratio: Tensor, mask: Tensor, level: str, bounds: tuple[float, ...]
) -> Metrics:
    """Returns metrics of the applied weights; the fractions count ratios that were out of bounds.

    For sequence weights, the maximum and minimum are those of the ratios before truncation.
    """
    low, high = (1 / bounds[0], bounds[0]) if len(bounds) == 1 else bounds
    row_mask = mask.any(-1)
    squares = masked_mean(weights**2, mask)
    ratio, scope_mask = _bounded_exp(log_ratio), mask
    if level == "sequence":
        row_log_ratio = masked_sum(log_ratio, mask, -1)
        ratio, scope_mask = _bounded_exp(row_log_ratio), row_mask
        min_ratio = (-_masked_max(-row_log_ratio, row_mask)).exp()
        extremes = {"_max": _masked_max(ratio, row_mask), "_min": min_ratio}
    else:
        extremes = {"_max": _masked_max(weights, mask), "_min": -_masked_max(-weights, mask)}
    ratio_per_row = ratio if level == "sequence" else masked_mean(ratio, mask, -1)
    weight_per_row = masked_mean(weights, mask, -1)
    metrics = {
        "rollout_is_mean": masked_mean(weights, mask),
        "rollout_is_std": masked_var(weights, mask, unbiased=False).sqrt(),
        **{f"rollout_is{key}": _zero_if_empty(row_mask, value) for key, value in extremes.items()},
        "rollout_is_eff_sample_size": masked_mean(weights, mask) ** 2
        / torch.where(squares > 0, squares, 1),
        "rollout_is_ratio_fraction_high": _fraction(ratio > high, scope_mask),
        "rollout_is_ratio_fraction_low": _fraction(ratio < low, scope_mask),
        **_summary("rollout_is_seq", weight_per_row, row_mask),
        "rollout_is_seq_max_deviation": _masked_max((weight_per_row - 1).abs(), row_mask),
        "rollout_is_seq_fraction_high": _fraction(ratio_per_row > high, row_mask),
        "rollout_is_seq_fraction_low": _fraction(ratio_per_row < low, row_mask),
    }
    if len(bounds) == 2:  # IcePop
        per_token = ratio.unsqueeze(-1).expand_as(mask) if level == "sequence" else ratio
        metrics["rollout_is_oob_ratio"] = _fraction((per_token < low) | (per_token > high), mask)
    return metrics


def rejection_metrics(
    results: Mapping[str, RejectionResult], keep_mask: Tensor, mask: Tensor
) -> Metrics:
    """Returns statistics and the rejection rate of each option, and the rate of all options together."""
    metrics = _rejection_rates("rollout_rs", keep_mask, mask)
    row_mask = mask.any(-1)
    for option, result in results.items():
        name = f"rollout_rs_{option}"
        values, low, high = result.values, result.low, result.high
        scope_mask = mask if values.dim() == 2 else row_mask
        token_values = values if values.dim() == 2 else values.unsqueeze(-1).expand_as(mask)
        row_values = masked_mean(values, mask, -1) if values.dim() == 2 else values
        bounded_values = token_values.clamp(low if math.isfinite(low) else 0.0, high)
        metrics |= {
            **_summary(name, token_values, mask),
            f"{name}_std": masked_var(bounded_values, mask, unbiased=False).sqrt(),
            f"{name}_fraction_high": _fraction(values > high, scope_mask),
            f"{name}_fraction_low": _fraction(values < low, scope_mask),
            **_summary(f"{name}_seq", row_values, row_mask),
            f"{name}_seq_max_deviation": _masked_max(row_values.abs(), row_mask),
            f"{name}_seq_fraction_high": _fraction(row_values > high, row_mask),
            f"{name}_seq_fraction_low": _fraction(row_values < low, row_mask),
            **_rejection_rates(name, result.keep_mask, mask),
        }
    return metrics


def _rejection_rates(name: str, keep_mask: Tensor, mask: Tensor) -> Metrics:
    """Returns the share of rejected tokens, and the share of rows with at least one rejected token."""
    rejected = mask & ~keep_mask
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


def _bounded_exp(x: Tensor) -> Tensor:
    """Returns exp(x), bounded so that it is always finite."""
    return x.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def _zero_if_empty(row_mask: Tensor, value: Tensor) -> Tensor:
    return value if row_mask.any() else torch.zeros_like(value)


def _fraction(flags: Tensor, mask: Tensor) -> Tensor:
    """Returns the fraction of the entries in the mask whose flag is set."""
    return masked_mean(flags.double(), mask)


def _masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the maximum over the mask; 0 if the mask is empty."""
    if not mask.any():
        return values.new_zeros(())
    return torch.where(mask, values, -torch.inf).amax()
