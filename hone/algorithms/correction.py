"""Correction for rollout log-probs that differ from the trainer's.

Importance weights multiply the policy loss; rejection removes tokens from `loss_mask`. `response_mask`
(the policy's tokens) is never changed, because advantages, KL and metrics use it.

`log_ratio` is x = log(train / rollout) at each token. The rejection options bound k1 = −x, k2 = ½·x² or
k3 = e^x − 1 − x. Bounds of k1 options are bounds of the ratio train/rollout; k2 and k3 have one upper bound.
The metrics have verl's names, without the prefix `rollout_corr/`; they ignore rows without a policy token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from hone.algorithms.policy_losses.policy_loss import log_prob_gap_metrics
from hone.config.algorithm import RolloutCorrectionConfig
from hone.config.block import setting
from hone.config.ranges import (
    IS_THRESHOLD_KEY,
    Bound,
    Bounds,
    OptionNames,
    parse_bound,
    rejection_bounds,
)
from hone.ops.rows import masked_mean, masked_sum, masked_var, zero_outside_mask
from hone.types import Settings

Metrics = dict[str, Tensor]
_SECTION = "algorithm.rollout_correction"
_PREFIX = "rollout_corr/"
EXPONENT_BOUND = 20.0
"""Exponents are bounded to ± this number, so that their exponentials are finite."""


def correct(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: Settings | None = None,
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Returns (importance weights or None, the loss mask after rejection, `rollout_corr/…` metrics)."""
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


@dataclass(frozen=True)
class RejectionResult:
    """The values of one option, its bounds and the tokens that it keeps."""

    values: Tensor  # [B, T] for token options, [B] for sequence options
    low: float
    high: float
    keep_mask: Tensor  # [B, T] bool


def rejection_mask(
    log_ratio: Tensor, mask: Tensor, options: OptionNames, bounds: Bounds
) -> tuple[Tensor, dict[str, RejectionResult]]:
    """Returns a mask of the tokens that pass every option, and the result of each option."""
    keep_mask = mask.bool()
    log_ratio = zero_outside_mask(log_ratio, mask).clamp(-EXPONENT_BOUND, EXPONENT_BOUND)
    results = {
        option: _apply_option(option, log_ratio, mask.bool(), low, high)
        for option, low, high in rejection_bounds(options, bounds)
    }
    for result in results.values():
        keep_mask = keep_mask & result.keep_mask
    return keep_mask, results


def catastrophic_tokens(log_ratio: Tensor, mask: Tensor, threshold: float) -> Tensor:  # [B, T] bool
    """Returns a mask of the tokens whose ratio train/rollout is below `threshold`."""
    return mask.bool() & (log_ratio < math.log(threshold))


def _apply_option(
    option: str, log_ratio: Tensor, mask: Tensor, low: float, high: float
) -> RejectionResult:
    """Returns the result of a rejection option, whose name is a level and an estimator (`seq_mean_k1`)."""
    level, estimator = option.rsplit("_", 1)
    match estimator:
        case "k1":
            per_token = -log_ratio
        case "k2":
            per_token = 0.5 * log_ratio**2
        case _:
            per_token = log_ratio.exp() - 1 - log_ratio
    match level:
        case "token":
            values = per_token
        case "seq_sum":
            values = masked_sum(per_token, mask, -1)
        case "seq_mean":
            values = masked_mean(per_token, mask, -1)
        case _:
            # k2 and k3 are never negative; the added 0 is the value of an empty row.
            values = pad(zero_outside_mask(per_token, mask), (0, 1)).amax(-1)
    in_bounds = (values >= low) & (values <= high)
    keep_mask = mask & (in_bounds if values.dim() == 2 else in_bounds[:, None])
    return RejectionResult(values, low, high, keep_mask)


def agreement_metrics(trainer: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """Returns metrics of the gap between rollout and trainer log-probs; perplexities are means over rows."""
    log_ratio = trainer - rollout
    row_mask = mask.any(-1)
    trainer_log_ppl, rollout_log_ppl = (-masked_mean(x, mask, -1) for x in (trainer, rollout))
    log_ppl_diff = trainer_log_ppl - rollout_log_ppl  # [B]
    row_log_ratio = masked_sum(log_ratio, mask, -1)
    token_gaps = log_prob_gap_metrics(trainer, rollout, mask)
    return {
        "kl": token_gaps["kl"],
        "k3_kl": token_gaps["k3_kl"],
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
    """Returns metrics of the weights; the fractions, and the extremes of sequence weights, are those of the
    ratios before truncation."""
    low, high = (1 / bounds[0], bounds[0]) if len(bounds) == 1 else bounds
    row_mask = mask.any(-1)
    squares = masked_mean(weights**2, mask)
    ratio, scope_mask = _bounded_exp(log_ratio), mask
    if level == "sequence":
        row_log_ratio = masked_sum(log_ratio, mask, -1)
        ratio, scope_mask = _bounded_exp(row_log_ratio), row_mask
        min_ratio = (-_masked_max(-row_log_ratio, row_mask)).exp() * row_mask.any()
        extremes = {"_max": _masked_max(ratio, row_mask), "_min": min_ratio}
    else:
        extremes = {"_max": _masked_max(weights, mask), "_min": -_masked_max(-weights, mask)}
    ratio_per_row = ratio if level == "sequence" else masked_mean(ratio, mask, -1)
    weight_per_row = masked_mean(weights, mask, -1)
    metrics = {
        "rollout_is_mean": masked_mean(weights, mask),
        "rollout_is_std": masked_var(weights, mask, unbiased=False).sqrt(),
        **{f"rollout_is{key}": value for key, value in extremes.items()},
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


def _fraction(flags: Tensor, mask: Tensor) -> Tensor:
    """Returns the fraction of the entries in the mask whose flag is set."""
    return masked_mean(flags.double(), mask)


def _masked_max(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the maximum over the mask; 0 if the mask is empty."""
    if not mask.any():
        return values.new_zeros(())
    return torch.where(mask, values, -torch.inf).amax()
