"""Estimators with other group baselines or scales: OPO, GPG, Pass@k, MaxRL, Lite-PPO.

In the formulas, R is a trajectory's score, len the number of its policy tokens, mean_g and std_g are over its
group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import EstimatorFunction, OutcomeEstimator, Outcomes
from hone.algorithms.advantages.grpo import EPS


@dataclass(frozen=True)
class OPO(OutcomeEstimator):
    """A = R − Σ len·R / Σ len over the group (2505.23585); a group of one keeps its raw score."""

    groups = "compared"

    def advantages(self, outcome: Outcomes) -> Tensor:
        groups = outcome.groups
        baseline = groups.mean(outcome.scores, outcome.lengths)[groups.ids]
        return outcome.scores - baseline.masked_fill(groups.is_singleton, 0.0)


@dataclass(frozen=True)
class GPG(OutcomeEstimator):
    """A = α·(R − mean_g)/f_norm (2504.02546), α = trajectories / trajectories whose score is not 0."""

    f_norm: float = 1.0

    groups = "compared"

    def __post_init__(self) -> None:
        if self.f_norm == 0:
            raise ValueError("gpg: f_norm divides the advantages and cannot be 0")

    def advantages(self, outcome: Outcomes) -> Tensor:
        scores = outcome.scores
        alpha = len(scores) / scores.count_nonzero().double().clamp(min=1)
        return alpha * (scores - outcome.baseline()) / self.f_norm


@dataclass(frozen=True)
class PassK(OutcomeEstimator):
    """Pass@k: A_best = (R_best − R_second) / (std_g + ε), others 0.

    A group of one has no second-best score and gets 0; a batch of only such groups is an error.
    """

    norm_adv_by_std_in_grpo: bool
    epsilon: float = EPS

    groups = "required"

    def advantages(self, outcome: Outcomes) -> Tensor:
        groups, scores = outcome.groups, outcome.scores
        has_second = groups.sizes > 1  # per group
        if groups.count and not has_second.any():
            raise ValueError(
                "grpo_passk compares the best response of a prompt with the second best, but no "
                "prompt of this batch has two responses; set actor_rollout_ref.rollout.n to 2 or "
                "more"
            )
        # Sorted by group and then by score, so the first two entries of a group are its best responses.
        order = torch.argsort(scores, descending=True, stable=True)
        order = order[torch.argsort(groups.ids[order], stable=True)]
        first_entries = (groups.sizes.cumsum(0) - groups.sizes).long()[has_second]
        best, second = order[first_entries], order[first_entries + 1]
        margin = scores[best] - scores[second]
        if self.norm_adv_by_std_in_grpo:
            divisor = groups.std(scores)[has_second] + self.epsilon
            margin = torch.where(divisor > 0, margin / divisor, 0.0)  # 0/0 if epsilon is 0
        return torch.zeros_like(scores).index_copy_(0, best, margin)


@dataclass(frozen=True)
class MaxRL(OutcomeEstimator):
    """A = (R − mean_g)/(mean_g + ε) (2602.02710): rarer successes get larger advantages.

    The mean is a success rate, so scores must not be negative. A group of one gets 0.
    """

    groups = "required"

    def advantages(self, outcome: Outcomes) -> Tensor:
        groups, scores = outcome.groups, outcome.scores
        if (scores < 0).any():
            raise ValueError(
                f"maxrl divides by the mean score of a group, so scores must be 0 or more; got "
                f"{float(scores.min()):g}. Use rewards such as 0/1 and put the KL in the loss "
                "(algorithm.use_kl_in_reward=false, actor_rollout_ref.actor.use_kl_loss=true)"
            )
        mean = groups.mean(scores)[groups.ids]
        return (scores - mean) / (mean + EPS)


@dataclass(frozen=True)
class LitePPO(OutcomeEstimator):
    """A = (R − mean_g)/(std_batch + ε) (2508.08221), std unbiased; a group of one gets 0."""

    groups = "required"

    def advantages(self, outcome: Outcomes) -> Tensor:
        groups, scores = outcome.groups, outcome.scores
        std = torch.std(scores) if len(scores) > 1 else scores.new_zeros(())
        return (scores - groups.mean(scores)[groups.ids]) / (std + EPS)


opo = EstimatorFunction("opo", OPO)
gpg = EstimatorFunction("gpg", GPG)
grpo_passk = EstimatorFunction("grpo_passk", PassK)
maxrl = EstimatorFunction("maxrl", MaxRL)
lite_ppo = EstimatorFunction("lite_ppo", LitePPO)
