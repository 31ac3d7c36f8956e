"""GPG (2504.02546): group-centred scores, scaled up for the share of samples that score nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hone.algorithms.advantages.outcome import Labels, outcomes
from hone.algorithms.keywords import estimator


@estimator
def gpg(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    trajectory_id: Labels | None = None,
    f_norm: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """A = α·(R − mean_g)/f_norm with α = trajectories / trajectories whose score is not 0."""
    if f_norm == 0:
        raise ValueError("gpg: f_norm divides the advantages and cannot be 0")
    outcome = outcomes("gpg", token_level_rewards, response_mask, index, trajectory_id)
    scores = outcome.scores
    alpha = len(scores) / scores.count_nonzero().double().clamp(min=1)
    spread = outcome.spread(alpha * (scores - outcome.baseline()) / f_norm)
    return spread, spread
