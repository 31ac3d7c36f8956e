"""OPO (2505.23585): the group's baseline weighs each response by its length."""

from __future__ import annotations

from dataclasses import dataclass

from hone.algorithms.advantages.estimator import Estimator, Pair, Trajectories, VerlForm
from hone.algorithms.advantages.outcome import outcomes


@dataclass(frozen=True)
class OPO(Estimator):
    """A = R − Σ len·R / Σ len over the group; a group of one keeps its raw score."""

    groups = "compared"

    def __call__(self, batch: Trajectories) -> Pair:
        outcome = outcomes("opo", batch.rewards, batch.mask, batch.uid, batch.trajectory_id)
        groups = outcome.groups
        baseline = groups.mean(outcome.scores, outcome.lengths)[groups.ids]
        spread = outcome.spread(outcome.scores - baseline.masked_fill(groups.singleton, 0.0))
        return spread, spread


opo = VerlForm("opo", OPO)
