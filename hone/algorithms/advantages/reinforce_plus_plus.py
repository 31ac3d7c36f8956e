"""REINFORCE++ (2501.03262): token returns whitened over the batch; and its form with group means.

The return is carried unchanged across tool tokens, so that a search or a program's output between
two turns does not cut the first turn off from the reward.
"""

from __future__ import annotations

from dataclasses import dataclass

from hone.algorithms.advantages.chain import Chain, rewards_to_go
from hone.algorithms.advantages.estimator import Estimator, Pair, Trajectories, VerlForm
from hone.algorithms.advantages.outcome import outcomes
from hone.ops.masked import masked_whiten


@dataclass(frozen=True)
class ReinforcePlusPlus(Estimator):
    """G_t = r_t + γ·G_next over the policy's tokens;  A = whiten(G)."""

    gamma: float

    groups = "ignored"

    def __call__(self, batch: Trajectories) -> Pair:
        chain = Chain.of(batch.uid, batch.trajectory_id, batch.rewards)
        returns = rewards_to_go(batch.rewards, batch.mask, self.gamma, chain)
        return masked_whiten(returns, batch.mask), returns


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(Estimator):
    """A = whiten(R − mean_g) over all tokens of the batch; a group of one enters with its raw R."""

    groups = "compared"

    def __call__(self, batch: Trajectories) -> Pair:
        name = "reinforce_plus_plus_baseline"
        outcome = outcomes(name, batch.rewards, batch.mask, batch.uid, batch.trajectory_id)
        spread = outcome.spread(outcome.whiten(outcome.scores - outcome.baseline()))
        return spread, spread


reinforce_plus_plus = VerlForm("reinforce_plus_plus", ReinforcePlusPlus)
reinforce_plus_plus_baseline = VerlForm("reinforce_plus_plus_baseline", ReinforcePlusPlusBaseline)
