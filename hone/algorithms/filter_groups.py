"""Filters the groups of a batch: one filter of DAPO and two of PURE.

Each function returns a mask [B] of the rows to keep; the trainer collects further groups.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hone.ops.groups import Groups, Labels


def keep_informative(scores: Labels, index: Labels) -> Tensor:
    """Keeps the groups whose scores differ, and groups of one (2503.14476)."""
    values, groups = _scores_and_groups(scores, index)
    return ((groups.max(values) > groups.min(values)) | (groups.sizes == 1))[groups.ids]


def remove_extreme(scores: Labels, index: Labels) -> Tensor:
    """Keeps the groups whose mean score is above 0 and below 1."""
    values, groups = _scores_and_groups(scores, index)
    mean = groups.mean(values)
    return ((mean > 0) & (mean < 1))[groups.ids]


def interquartile(
    scores: Labels, index: Labels, lower_percentile_bound: float, upper_percentile_bound: float
) -> Tensor:
    """Keeps the groups whose mean score lies between two percentiles of all groups' means.

    If both percentiles are the same number, every group with that mean is kept.
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


def _scores_and_groups(scores: Labels, index: Labels) -> tuple[Tensor, Groups]:
    values = torch.as_tensor(
        scores if isinstance(scores, Tensor) else np.asarray(scores, dtype=np.float64)
    ).double()
    if values.dim() != 1 or len(values) != len(index):
        raise ValueError(
            f"group filter: scores have shape {tuple(values.shape)} for {len(index)} labels; "
            "give one number per row"
        )
    return values, Groups.of(index, values.device)
