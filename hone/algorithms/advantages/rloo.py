"""Leave-one-out baselines: RLOO over scores, and over token returns for process rewards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import (
    GROUP_ARGUMENTS,
    Estimate,
    Estimator,
    EstimatorFunction,
    Outcomes,
    Trajectories,
)
from hone.algorithms.advantages.returns import RowOrder, rewards_to_go
from hone.algorithms.credit import STRICT_MIN, step_lengths, total_min_form_returns
from hone.ops.rows import masked_whiten, zero_outside_mask


@dataclass(frozen=True)
class RLOOToken(Estimator):
    """A_t = G_t − Σ_{j≠i} Σ_t G_j / Σ_{j≠i} len_j (PURE, 2504.15275); a group of one has no baseline.

    G is the return at a token of response i, and j another response of the group. With `credit_assignment`
    "strict min-form", G is the minimum over future steps, otherwise the (discounted) sum of future rewards.
    With `process_baseline` "step" or "token", each step reward has a baseline.
    """

    gamma: float
    credit_assignment: float | str | None = None
    process_baseline: str = "return"

    group_use = "required"

    @property
    def requires(self) -> tuple[str, ...]:
        if self.process_baseline != "return":
            return ("reward/process", "step_mask", "token_level_scores")
        return ("reward/process", "step_mask") if self.credit_assignment == STRICT_MIN else ()

    def __call__(self, batch: Trajectories) -> Estimate:
        row_order = RowOrder.from_labels(batch.uid, batch.trajectory_id, batch.rewards)
        if self.credit_assignment == STRICT_MIN:
            process_rewards, step_mask = batch.column("reward/process"), batch.column("step_mask")
            returns = total_min_form_returns(
                batch.rewards, process_rewards, step_mask, batch.mask, row_order
            )
        else:
            returns = rewards_to_go(batch.rewards, batch.mask, self.gamma, row_order)
        if self.process_baseline != "return":
            return self._step_advantages(batch, row_order), returns
        # Per trajectory: the sum of returns over tokens and the number of tokens.
        outcome = batch.outcomes("rloo_token", returns)
        baseline = _leave_one_out(outcome, outcome.scores, outcome.lengths)
        return zero_outside_mask(returns - baseline, batch.mask), returns

    def _step_advantages(self, batch: Trajectories, row_order: RowOrder | None) -> Tensor:
        """Returns [B, T] sums of future rewards, each minus its baseline per step or per token."""
        step_mask = batch.column("step_mask").bool()
        process_rewards = zero_outside_mask(batch.column("reward/process"), step_mask)
        outcome = batch.outcomes("rloo_token", process_rewards)
        ones = torch.ones_like(outcome.lengths)
        if self.process_baseline == "token":
            per_token = _leave_one_out(outcome, outcome.scores, outcome.lengths)
            baselines = per_token * step_lengths(step_mask, batch.mask)
        else:
            step_counts = outcome.sum_rows(step_mask.sum(-1).double()).clamp(min=1)
            baselines = _leave_one_out(outcome, outcome.scores / step_counts, ones) * step_mask
        returns = rewards_to_go(batch.rewards - baselines, batch.mask, self.gamma, row_order)
        other_scores = batch.column("token_level_scores") - process_rewards
        other_outcome = batch.outcomes("rloo_token", other_scores)
        baseline = _leave_one_out(other_outcome, other_outcome.scores, ones)
        return zero_outside_mask(returns - baseline, batch.mask)


def _leave_one_out(outcome: Outcomes, values: Tensor, weights: Tensor) -> Tensor:
    """Returns [B, 1] Σ_{j≠i} values / Σ_{j≠i} weights over the other trajectories of the group, or 0."""
    groups = outcome.groups
    value_sum, weight_sum = (groups.sum(x)[groups.ids] - x for x in (values, weights))
    ratio = value_sum / weight_sum.clamp(min=1)
    per_row = ratio if outcome.row_trajectory is None else ratio[outcome.row_trajectory]
    return per_row.to(outcome.rewards.dtype).unsqueeze(-1)


@dataclass(frozen=True)
class RLOO(Estimator):
    """A = R − mean of the group's other scores = (R − mean_g)·n/(n−1); a group of one keeps its raw R.

    With process rewards, the estimator is `rloo_token` without discount, as in PURE.
    """

    credit_assignment: float | str | None = None
    process_baseline: str = "return"

    group_use = "compared"

    @property
    def requires(self) -> tuple[str, ...]:
        return () if self.credit_assignment is None else self._token_estimator.requires

    @property
    def _token_estimator(self) -> RLOOToken:
        return RLOOToken(1.0, self.credit_assignment, self.process_baseline)

    def __call__(self, batch: Trajectories) -> Estimate:
        if self.credit_assignment is not None:
            return self._token_estimator(batch)
        outcome = batch.outcomes("rloo", batch.rewards)
        group_size = outcome.groups.sizes[outcome.groups.ids]
        scale = torch.where(group_size > 1, group_size / (group_size - 1).clamp(min=1), 1.0)
        advantages = outcome.broadcast((outcome.scores - outcome.baseline()) * scale)
        return advantages, advantages


@dataclass(frozen=True)
class PrimeRLOO(Estimator):
    """Whitened G_t = c_gt · (R·n − Σ_j R_j)/(n−1) + Σ_{s≥t} [c_dpo · (r_s·n − Σ_j mean r_j)/(n−1) − KL_s].

    R is a score, r the column `reward/implicit`, and j one of the group's n responses (PRIME, 2502.01456).
    """

    reward_gt_coef: float
    reward_dpo_coef: float

    group_use = "required"

    requires = ("reward/implicit", "token_level_scores")

    def __call__(self, batch: Trajectories) -> Estimate:
        implicit, scores = batch.column("reward/implicit"), batch.column("token_level_scores")
        outcome = batch.outcomes("prime", scores)
        process_outcome = batch.outcomes("prime", implicit)
        groups = outcome.groups
        size = groups.sizes[groups.ids]
        other_count = (size - 1).clamp(min=1)
        scale = torch.where(size > 1, size / (size - 1), 1.0)
        is_single = groups.is_singleton
        score_sum = groups.sum(outcome.scores)[groups.ids].masked_fill(is_single, 0.0)
        mean_rewards = process_outcome.scores / process_outcome.lengths.clamp(min=1)
        mean_sum = groups.sum(mean_rewards)[groups.ids].masked_fill(is_single, 0.0)
        process_advantage = implicit * process_outcome.broadcast(scale)
        process_advantage -= process_outcome.broadcast(mean_sum / other_count)
        penalty = batch.rewards - scores  # −KL, if it is part of the reward
        rewards = self.reward_dpo_coef * process_advantage + penalty
        row_order = RowOrder.from_labels(batch.uid, batch.trajectory_id, rewards)
        returns = rewards_to_go(rewards, batch.mask, 1.0, row_order)
        outcome_advantage = outcome.broadcast(outcome.scores * scale - score_sum / other_count)
        returns = returns + self.reward_gt_coef * outcome_advantage
        return masked_whiten(returns, batch.mask), returns


rloo = EstimatorFunction("rloo", RLOO, f"{GROUP_ARGUMENTS} epsilon config")
rloo_token = EstimatorFunction("rloo_token", RLOOToken)
prime_rloo = EstimatorFunction("prime_rloo", PrimeRLOO)
