"""PRIME's leave-one-out advantages: outcome and implicit process rewards have separate baselines."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hone.algorithms.advantages.estimator import (
    Estimate,
    Estimator,
    EstimatorFunction,
    Trajectories,
    outcomes,
)
from hone.algorithms.advantages.returns import RowOrder, rewards_to_go
from hone.ops.masked import masked_whiten


@dataclass(frozen=True)
class PrimeRLOO(Estimator):
    """Whitened G_t = c_gt · (R·n − Σ_j R_j)/(n−1) + Σ_{s≥t} [c_dpo · (r_s·n − Σ_j mean r_j)/(n−1) − KL_s].

    R is a score, r the column `reward/implicit`, and j one of the group's n responses; c_gt and c_dpo are
    reward_gt_coef and reward_dpo_coef (PRIME, 2502.01456).
    """

    reward_gt_coef: float
    reward_dpo_coef: float

    groups = "required"

    @property
    def requires(self) -> tuple[str, ...]:
        return ("reward/implicit", "token_level_scores")

    def __call__(self, batch: Trajectories) -> Estimate:
        implicit, scores = batch.column("reward/implicit"), batch.column("token_level_scores")
        grouping = (batch.mask, batch.uid, batch.trajectory_id)
        outcome = outcomes("prime", scores, *grouping)
        process_outcome = outcomes("prime", implicit, *grouping)
        groups = outcome.groups
        size = groups.sizes[groups.ids]
        other_count = (size - 1).clamp(min=1)
        scale = torch.where(size > 1, size / (size - 1), 1.0)
        is_single = groups.is_singleton
        score_sum = groups.sum(outcome.scores)[groups.ids].masked_fill(is_single, 0.0)
        mean_rewards = process_outcome.scores / process_outcome.lengths.clamp(min=1)
        mean_sum = groups.sum(mean_rewards)[groups.ids].masked_fill(is_single, 0.0)
        process_advantage = implicit * process_outcome.broadcast(scale) - process_outcome.broadcast(
            mean_sum / other_count
        )
        penalty = batch.rewards - scores  # −KL, if it is part of the reward
        row_order = RowOrder.from_labels(batch.uid, batch.trajectory_id, batch.rewards)
        returns = rewards_to_go(
            self.reward_dpo_coef * process_advantage + penalty, batch.mask, 1.0, row_order
        ) + self.reward_gt_coef * outcome.broadcast(
            outcome.scores * scale - score_sum / other_count
        )
        return masked_whiten(returns, batch.mask), returns


prime_rloo = EstimatorFunction("prime_rloo", PrimeRLOO)
