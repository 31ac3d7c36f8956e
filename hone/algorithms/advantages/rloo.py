"""Leave-one-out: each score is compared with the mean of the others of its group.

A group of one keeps its raw score, under both of verl's names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hone.algorithms.advantages.estimator import Estimator, Pair, Trajectories, VerlForm
from hone.algorithms.advantages.outcome import outcomes


@dataclass(frozen=True)
class RLOO(Estimator):
    """A = R − mean of the group's other scores = (R − mean_g)·n/(n−1)."""

    groups = "required"

    def __call__(self, batch: Trajectories) -> Pair:
        outcome = outcomes("rloo", batch.rewards, batch.mask, batch.uid, batch.trajectory_id)
        size = outcome.groups.sizes[outcome.groups.ids]
        scale = torch.where(size > 1, size / (size - 1).clamp(min=1), 1.0)
        spread = outcome.spread((outcome.scores - outcome.baseline()) * scale)
        return spread, spread


rloo = VerlForm("rloo", RLOO)
