"""Pass@k training: only the best response of a group learns, by how far it beats the second."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.grpo import EPS
from hone.algorithms.advantages.outcome import Labels, outcomes
from hone.algorithms.keywords import estimator
from hone.algorithms.settings import setting


@estimator
def grpo_passk(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    trajectory_id: Labels | None = None,
    norm_adv_by_std_in_grpo: bool | None = None,
    epsilon: float = EPS,
) -> tuple[Tensor, Tensor]:
    """A_best = (R_best − R_second) / (std_g + ε), others 0.

    A group of one has no second and gets 0; a batch with nothing but such groups is an error.
    """
    by_std = norm_adv_by_std_in_grpo
    if by_std is None:
        by_std = setting(config, "norm_adv_by_std_in_grpo", "algorithm")
    outcome = outcomes("grpo_passk", token_level_rewards, response_mask, index, trajectory_id)
    groups, scores = outcome.groups, outcome.scores
    compared = groups.sizes > 1
    if groups.count and not compared.any():
        raise ValueError(
            "grpo_passk compares the best response of a prompt with the second best, and no prompt "
            "of this batch has two responses; set actor_rollout_ref.rollout.n to 2 or more"
        )
    # Sorted by group, best first: the first two places of each group are its best and second.
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[torch.argsort(groups.ids[order], stable=True)]
    first = (groups.sizes.cumsum(0) - groups.sizes).long()[compared]
    best, second = order[first], order[first + 1]
    margin = scores[best] - scores[second]
    if by_std:
        divisor = groups.std(scores)[compared] + epsilon
        margin = torch.where(divisor > 0, margin / divisor, 0.0)  # 0/0 where epsilon is 0
    spread = outcome.spread(torch.zeros_like(scores).index_copy_(0, best, margin))
    return spread, spread
