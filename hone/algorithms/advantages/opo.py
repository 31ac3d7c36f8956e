"""OPO (2505.23585): the group's baseline weighs each response by its length."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hone.algorithms.advantages.outcome import Labels, outcomes
from hone.algorithms.keywords import estimator


@estimator
def opo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    trajectory_id: Labels | None = None,
) -> tuple[Tensor, Tensor]:
    """A = R − Σ len·R / Σ len over the group; a group of one keeps its raw score."""
    outcome = outcomes("opo", token_level_rewards, response_mask, index, trajectory_id)
    groups = outcome.groups
    baseline = groups.mean(outcome.scores, outcome.lengths)[groups.ids]
    spread = outcome.spread(outcome.scores - baseline.masked_fill(groups.singleton, 0.0))
    return spread, spread
