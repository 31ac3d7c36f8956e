"""Leave-one-out: each score is compared with the mean of the others of its group.

A group of one keeps its raw score, under both of verl's names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hone.algorithms.advantages.estimator import Estimator, Pair, Trajectories, VerlForm
from hone.algorithms.advantages.outcome import outcomes
from hone.algorithms.advantages.rloo_token import RLOOToken
from hone.algorithms.credit import STRICT_MIN


@dataclass(frozen=True)
class RLOO(Estimator):
    """A = R − mean of the group's other scores = (R − mean_g)·n/(n−1).

    The strict minimum of process rewards is a return of tokens: there it is `rloo_token`.
    """

    credit_assignment: float | str | None = None

    groups = "required"

    @property
    def requires(self) -> tuple[str, ...]:
        return RLOOToken(1.0, self.credit_assignment).requires

    def __call__(self, batch: Trajectories) -> Pair:
        if self.credit_assignment == STRICT_MIN:
            return RLOOToken(1.0, STRICT_MIN)(batch)
        outcome = outcomes("rloo", batch.rewards, batch.mask, batch.uid, batch.trajectory_id)
        size = outcome.groups.sizes[outcome.groups.ids]
        scale = torch.where(size > 1, size / (size - 1).clamp(min=1), 1.0)
        spread = outcome.spread((outcome.scores - outcome.baseline()) * scale)
        return spread, spread


rloo = VerlForm("rloo", RLOO)
