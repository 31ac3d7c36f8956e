"""Metrics of rollout/training agreement, importance weights and rejection.

Names and quantities are verl's, without the prefix `rollout_corr/`; rows without a policy token are
ignored. Nothing here changes training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from hone.algorithms.rejection import EXPONENT_BOUND, Verdict
from hone.ops.masked import masked_fill_zero, masked_mean, masked_sum, masked_var

Metrics = dict[str, Tensor]


def gap_metrics(ours: Tensor, rollout: Tensor, mask: Tensor) -> tuple[Metrics, Metrics]:
    """Returns (means, maxima) of the per-token gap between rollout and trainer log-probs."""
    mask = mask.bool()
    gap = masked_fill_zero(ours - rollout, mask)
    means = {"kl": -masked_mean(gap, mask), "log_prob_abs_diff_mean": masked_mean(gap.abs(), mask)}
    return means, {"log_prob_abs_diff_max": gap.abs().max() if gap.numel() else gap.new_zeros(())}


def agreement_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """Returns metrics of the gap between rollout and trainer log-probs; perplexities are row means."""
    log_ratio = old - rollout
    rows = mask.any(-1)
    train_log_ppl, rollout_log_ppl = (-masked_mean(x, mask, -1) for x in (old, rollout))
    difference = train_log_ppl - rollout_log_ppl  # [B]
    of_row = masked_sum(log_ratio, mask, -1)
    return {
        "kl": gap_metrics(old, rollout, mask)[0]["kl"],
        "k3_kl": masked_mean(_exp(log_ratio) - log_ratio - 1, mask),
        "training_ppl": masked_mean(_exp(train_log_ppl), rows),
        "training_log_ppl": masked_mean(train_log_ppl, rows),
        "rollout_ppl": masked_mean(_exp(rollout_log_ppl), rows),
        "rollout_log_ppl": masked_mean(rollout_log_ppl, rows),
        "log_ppl_diff": masked_mean(difference, rows),
        "log_ppl_abs_diff": masked_mean(difference.abs(), rows),
        "log_ppl_diff_max": _largest(difference, rows),
        "log_ppl_diff_min": -_largest(-difference, rows),
        "ppl_ratio": masked_mean(_exp(difference), rows),
        "chi2_token": masked_mean(_exp(log_ratio) ** 2, mask) - 1,
        "chi2_seq": masked_mean(_exp(of_row) ** 2, rows) - 1,
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
    ratio, counted = _exp(log_ratio), mask
    if level == "sequence":
        of_row = masked_sum(log_ratio, mask, -1)
        ratio, counted = _exp(of_row), rows
        extremes = {"_max": _largest(ratio, rows), "_min": (-_largest(-of_row, rows)).exp()}
    else:
        extremes = {"_max": _largest(weights, mask), "_min": -_largest(-weights, mask)}
    raw_of_row = ratio if level == "sequence" else masked_mean(ratio, mask, -1)
    applied = masked_mean(weights, mask, -1)
    metrics = {
        "rollout_is_mean": masked_mean(weights, mask),
        "rollout_is_std": masked_var(weights, mask, unbiased=False).sqrt(),
        **{f"rollout_is{key}": _where_any(rows, value) for key, value in extremes.items()},
        "rollout_is_eff_sample_size": masked_mean(weights, mask) ** 2
        / torch.where(squares > 0, squares, 1),
        "rollout_is_ratio_fraction_high": _share(ratio > high, counted),
        "rollout_is_ratio_fraction_low": _share(ratio < low, counted),
        **_summary("rollout_is_seq", applied, rows),
        "rollout_is_seq_max_deviation": _largest((applied - 1).abs(), rows),
        "rollout_is_seq_fraction_high": _share(raw_of_row > high, rows),
        "rollout_is_seq_fraction_low": _share(raw_of_row < low, rows),
    }
    if len(bounds) == 2:  # IcePop
        per_token = ratio.unsqueeze(-1).expand_as(mask) if level == "sequence" else ratio
        metrics["rollout_is_oob_ratio"] = _share((per_token < low) | (per_token > high), mask)
    return metrics


def rejection_metrics(verdicts: Mapping[str, Verdict], keep: Tensor, mask: Tensor) -> Metrics:
    """Returns each option's values and rejection rate, and the rejection rate of all together."""
    metrics = _rejected("rollout_rs", keep, mask)
    rows = mask.any(-1)
    for option, verdict in verdicts.items():
        name = f"rollout_rs_{option}"
        values, low, high = verdict.values, verdict.low, verdict.high
        judged = mask if values.dim() == 2 else rows
        tokens = values if values.dim() == 2 else values.unsqueeze(-1).expand_as(mask)
        of_row = masked_mean(values, mask, -1) if values.dim() == 2 else values
        bounded = tokens.clamp(low if math.isfinite(low) else 0.0, high)
        metrics |= {
            **_summary(name, tokens, mask),
            f"{name}_std": masked_var(bounded, mask, unbiased=False).sqrt(),
            f"{name}_fraction_high": _share(values > high, judged),
            f"{name}_fraction_low": _share(values < low, judged),
            **_summary(f"{name}_seq", of_row, rows),
            f"{name}_seq_max_deviation": _largest(of_row.abs(), rows),
            f"{name}_seq_fraction_high": _share(of_row > high, rows),
            f"{name}_seq_fraction_low": _share(of_row < low, rows),
            **_rejected(name, verdict.keep, mask),
        }
    return metrics


def _rejected(name: str, keep: Tensor, mask: Tensor) -> Metrics:
    """Returns the share of rejected tokens, and of rows with at least one."""
    lost = mask & ~keep
    return {
        f"{name}_masked_fraction": _share(lost, mask),
        f"{name}_seq_masked_fraction": _share(lost.any(-1), mask.any(-1)),
    }


def _summary(name: str, values: Tensor, mask: Tensor) -> Metrics:
    return {
        f"{name}_mean": masked_mean(values, mask),
        f"{name}_std": masked_var(values, mask).sqrt(),
        f"{name}_max": _largest(values, mask),
        f"{name}_min": -_largest(-values, mask),
    }


def _exp(x: Tensor) -> Tensor:
    """Returns exp(x), bounded so that it is always finite."""
    return x.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def _where_any(rows: Tensor, value: Tensor) -> Tensor:
    return value if rows.any() else torch.zeros_like(value)


def _share(flags: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(flags.double(), mask)


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the maximum over the mask; 0 if the mask is empty."""
    if not mask.any():
        return values.new_zeros(())
    return torch.where(mask, values, -torch.inf).amax()
