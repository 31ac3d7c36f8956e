"""Pass@k training: only the best response of a group learns, by how far it beats the second."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hone.algorithms.advantages.estimator import Estimator, Pair, Trajectories, VerlForm
from hone.algorithms.advantages.grpo import EPS
from hone.algorithms.advantages.outcome import outcomes


@dataclass(frozen=True)
class PassK(Estimator):
    """A_best = (R_best − R_second) / (std_g + ε), others 0.

    A group of one has no second and gets 0; a batch with nothing but such groups is an error.
    """

    norm_adv_by_std_in_grpo: bool
    epsilon: float = EPS

    groups = "required"

    def __call__(self, batch: Trajectories) -> Pair:
        outcome = outcomes("grpo_passk", batch.rewards, batch.mask, batch.uid, batch.trajectory_id)
        groups, scores = outcome.groups, outcome.scores
        compared = groups.sizes > 1
        if groups.count and not compared.any():
            raise ValueError(
                "grpo_passk compares the best response of a prompt with the second best, and no "
                "prompt of this batch has two responses; set actor_rollout_ref.rollout.n to 2 or "
                "more"
            )
        # Sorted by group, best first: the first two places of each group are its best and second.
        order = torch.argsort(scores, descending=True, stable=True)
        order = order[torch.argsort(groups.ids[order], stable=True)]
        first = (groups.sizes.cumsum(0) - groups.sizes).long()[compared]
        best, second = order[first], order[first + 1]
        margin = scores[best] - scores[second]
        if self.norm_adv_by_std_in_grpo:
            divisor = groups.std(scores)[compared] + self.epsilon
            margin = torch.where(divisor > 0, margin / divisor, 0.0)  # 0/0 where epsilon is 0
        spread = outcome.spread(torch.zeros_like(scores).index_copy_(0, best, margin))
        return spread, spread


grpo_passk = VerlForm("grpo_passk", PassK)
