"""Scores relative to the group: GRPO, and Dr.GRPO without the division by the deviation.

A group of one keeps its raw score. A group of equal scores gets 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.outcome import Labels, outcomes
from hone.algorithms.keywords import estimator
from hone.algorithms.settings import setting
from hone.ops.groups import Groups

EPS = 1e-6


@estimator
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    trajectory_id: Labels | None = None,
    norm_adv_by_std_in_grpo: bool | None = None,
    epsilon: float = EPS,
) -> tuple[Tensor, Tensor]:
    """A = (R − mean_g) / (std_g + ε), std unbiased; without the division if so configured."""
    by_std = norm_adv_by_std_in_grpo
    if by_std is None:
        by_std = setting(config, "norm_adv_by_std_in_grpo", "algorithm")
    outcome = outcomes("grpo", token_level_rewards, response_mask, index, trajectory_id)
    spread = outcome.spread(relative_to_group(outcome.groups, outcome.scores, by_std, epsilon))
    return spread, spread


def relative_to_group(groups: Groups, scores: Tensor, by_std: bool, epsilon: float = EPS) -> Tensor:
    """[N] score minus group mean, over the group's deviation; a group of one: mean 0, deviation 1."""
    mean = groups.mean(scores)[groups.ids].masked_fill(groups.singleton, 0.0)
    if not by_std:
        return scores - mean
    std = groups.std(scores)[groups.ids].masked_fill(groups.singleton, 1.0)
    divisor = std + epsilon
    return torch.where(divisor > 0, (scores - mean) / divisor, 0.0)  # 0/0 where epsilon is 0


@estimator
def dr_grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    trajectory_id: Labels | None = None,
) -> tuple[Tensor, Tensor]:
    """A = R − mean_g: GRPO without the bias towards easy and hard prompts."""
    outcome = outcomes("dr_grpo", token_level_rewards, response_mask, index, trajectory_id)
    spread = outcome.spread(relative_to_group(outcome.groups, outcome.scores, by_std=False))
    return spread, spread
