"""Leave-one-out: each score is compared with the mean of the others of its group.

A group of one keeps its raw score, under both of verl's names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.outcome import Labels, outcomes
from hone.algorithms.keywords import estimator


@estimator
def rloo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    trajectory_id: Labels | None = None,
) -> tuple[Tensor, Tensor]:
    """A = R − mean of the group's other scores = (R − mean_g)·n/(n−1)."""
    outcome = outcomes("rloo", token_level_rewards, response_mask, index, trajectory_id)
    size = outcome.groups.sizes[outcome.groups.ids]
    scale = torch.where(size > 1, size / (size - 1).clamp(min=1), 1.0)
    spread = outcome.spread((outcome.scores - outcome.baseline()) * scale)
    return spread, spread
