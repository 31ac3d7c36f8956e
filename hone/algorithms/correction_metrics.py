"""What is reported about rollout/training agreement, importance weights and rejection.

Names are the family's, here without the prefix `rollout_corr/`. Nothing here changes training.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hone.algorithms.rejection import EXPONENT_BOUND, Verdict
from hone.ops.masked import masked_mean, masked_sum, masked_var

Metrics = dict[str, Tensor]


def agreement_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> Metrics:
    """How far the rollout's log-probs are from the trainer's; perplexities are means over rows."""
    log_ratio = old - rollout
    rows = mask.any(-1)
    train_log_ppl, rollout_log_ppl = (-masked_mean(x, mask, -1) for x in (old, rollout))
    difference = train_log_ppl - rollout_log_ppl  # [B]
    of_row = masked_sum(log_ratio, mask, -1)
    return {
        "kl": masked_mean(-log_ratio, mask),
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


def weight_metrics(ratio: Tensor, mask: Tensor, band: tuple[float, float]) -> Metrics:
    """Of the ratios before truncation; deviation and effective sample size of those in the band."""
    low, high = band
    rows = mask.any(-1)
    of_row = masked_mean(ratio, mask, -1)
    bounded = ratio.clamp(low, high)
    squares = masked_mean(bounded**2, mask)
    return {
        **_summary("rollout_is", ratio, mask),
        "rollout_is_std": masked_var(bounded, mask).sqrt(),
        "rollout_is_eff_sample_size": masked_mean(bounded, mask) ** 2
        / torch.where(squares > 0, squares, 1),
        "rollout_is_ratio_fraction_high": _share(ratio > high, mask),
        "rollout_is_ratio_fraction_low": _share(ratio < low, mask),
        **_summary("rollout_is_seq", of_row, rows),
        "rollout_is_seq_max_deviation": _largest((of_row - 1).abs(), rows),
        "rollout_is_seq_fraction_high": _share(of_row > high, rows),
        "rollout_is_seq_fraction_low": _share(of_row < low, rows),
    }


def rejection_metrics(verdicts: Mapping[str, Verdict], keep: Tensor, mask: Tensor) -> Metrics:
    """Each option's own values, and what was rejected by it and by all together."""
    metrics = _rejected("rollout_rs", keep, mask)
    rows = mask.any(-1)
    for option, verdict in verdicts.items():
        name = f"rollout_rs_{option}"
        values, low, high = verdict.values, verdict.low, verdict.high
        if values.dim() == 2:
            of_row = masked_mean(values, mask, -1)
        else:
            of_row = values
            values = values.unsqueeze(-1).expand_as(mask)
        metrics |= {
            **_summary(name, values, mask),
            f"{name}_fraction_high": _share(values > high, mask),
            f"{name}_fraction_low": _share(values < low, mask),
            **_summary(f"{name}_seq", of_row, rows),
            f"{name}_seq_fraction_high": _share(of_row > high, rows),
            f"{name}_seq_fraction_low": _share(of_row < low, rows),
            **_rejected(name, verdict.keep, mask),
        }
    return metrics


def _rejected(name: str, keep: Tensor, mask: Tensor) -> Metrics:
    """Share of tokens rejected, and of rows that lost at least one."""
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
    """Finite whatever x is."""
    return x.clamp(-EXPONENT_BOUND, EXPONENT_BOUND).exp()


def _share(flags: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(flags.double(), mask)


def _largest(values: Tensor, mask: Tensor) -> Tensor:
    """Of the kept entries; 0 where none is kept."""
    if not mask.any():
        return values.new_zeros(())
    return torch.where(mask, values, -torch.inf).amax()
