"""Advantages relative to the group: GRPO, and Dr.GRPO without division by the standard deviation.

In the formulas, R is a trajectory's score; mean_g and std_g are over its group. A group of one keeps its raw
score. A group of equal scores gets 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import EstimatorFunction, OutcomeEstimator, Outcomes
from hone.ops.groups import Groups

EPS = 1e-6


@dataclass(frozen=True)
class GRPO(OutcomeEstimator):
    """A = (R − mean_g) / (std_g + ε), std unbiased; the division is optional."""

    norm_adv_by_std_in_grpo: bool
    epsilon: float = EPS

    groups = "compared"  # a group of one keeps its raw score

    def advantages(self, outcome: Outcomes) -> Tensor:
        divide_by_std = self.norm_adv_by_std_in_grpo
        return group_relative_scores(outcome.groups, outcome.scores, divide_by_std, self.epsilon)


@dataclass(frozen=True)
class DrGRPO(OutcomeEstimator):
    """A = R − mean_g: GRPO without the bias towards easy and hard prompts."""

    groups = "compared"  # a group of one keeps its raw score

    def advantages(self, outcome: Outcomes) -> Tensor:
        return group_relative_scores(outcome.groups, outcome.scores, divide_by_std=False)


def group_relative_scores(
    groups: Groups, scores: Tensor, divide_by_std: bool, epsilon: float = EPS
) -> Tensor:
    """Returns [N] (score − group mean) / group std; a group of one has mean 0 and std 1."""
    mean = groups.mean(scores)[groups.ids].masked_fill(groups.is_singleton, 0.0)
    if not divide_by_std:
        return scores - mean
    std = groups.std(scores)[groups.ids].masked_fill(groups.is_singleton, 1.0)
    divisor = std + epsilon
    return torch.where(divisor > 0, (scores - mean) / divisor, 0.0)  # 0/0 if epsilon is 0


# Functions with verl's signature.
grpo = EstimatorFunction("grpo", GRPO)
dr_grpo = EstimatorFunction("dr_grpo", DrGRPO)
