"""Selects rows of a batch: the group filters of DAPO and PURE, and PF-PPO's resampling.

A filter returns a mask [B] of the rows to keep; rows with an equal `index` are one group. The trainer
generates groups to replace the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from hone.ops.rows import Groups, Labels

Scores: TypeAlias = Sequence[float] | np.ndarray | Tensor
"""[B] one score per row."""
_MIN_WEIGHT = 1e-8


def keep_informative(scores: Scores, index: Labels) -> Tensor:
    """Keeps the groups whose scores differ, and groups of one (2503.14476)."""
    values, groups = _scores_and_groups(scores, index)
    return ((groups.max(values) > groups.min(values)) | (groups.sizes == 1))[groups.ids]


def remove_extreme(scores: Scores, index: Labels) -> Tensor:
    """Keeps the groups whose mean score is above 0 and below 1."""
    values, groups = _scores_and_groups(scores, index)
    mean = groups.mean(values)
    return ((mean > 0) & (mean < 1))[groups.ids]


def interquartile(
    scores: Scores, index: Labels, lower_percentile_bound: float, upper_percentile_bound: float
) -> Tensor:
    """Keeps the groups whose mean score is in [low, high), or equal to both if low equals high.

    low and high are the two percentiles of the mean scores of all groups.
    """
    values, groups = _scores_and_groups(scores, index)
    mean = groups.mean(values)
    if not len(mean):
        return torch.zeros(0, dtype=torch.bool)
    bounds = torch.tensor(
        [lower_percentile_bound, upper_percentile_bound], dtype=mean.dtype, device=mean.device
    )
    low, high = torch.quantile(mean, bounds / 100)
    return ((mean >= low) & ((mean < high) | (low == high) & (mean == high)))[groups.ids]


def _scores_and_groups(scores: Scores, index: Labels) -> tuple[Tensor, Groups]:
    values = torch.as_tensor(
        scores if isinstance(scores, Tensor) else np.asarray(scores, dtype=np.float64)
    ).double()
    if values.dim() != 1 or len(values) != len(index):
        raise ValueError(
            f"group filter: scores have shape {tuple(values.shape)} for {len(index)} rows; "
            "give one number per row"
        )
    return values, Groups.of(index, values.device)


def pf_ppo_weights(scores: Tensor, reweight_method: str, weight_pow: float) -> Tensor:
    """Returns [B] the sampling weight of each row (PF-PPO, 2409.06957).

    pow: |score|^p. max_min: 1 for the best and the worst, 0 for the others. max_random: 0.4 for the best, 0.1
    for the others.
    """
    if reweight_method == "pow":
        weights = scores.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)
    elif reweight_method == "max_random":
        weights = torch.full_like(scores, 0.1).masked_fill(scores == scores.max(), 0.4)
    else:
        raise ValueError(
            f"algorithm.pf_ppo.reweight_method={reweight_method!r} is unknown; "
            "use pow, max_min or max_random"
        )
    return weights + _MIN_WEIGHT  # rows can be sampled even if all weights were 0


def pf_ppo_rows(
    scores: Tensor, reweight_method: str, weight_pow: float, generator: torch.Generator
) -> Tensor:
    """Returns [B] row indices, sampled with replacement by their weights."""
    if not len(scores):
        return torch.zeros(0, dtype=torch.long, device=scores.device)
    weights = pf_ppo_weights(scores, reweight_method, weight_pow)
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)
