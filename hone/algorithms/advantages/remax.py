"""ReMax (2310.10505): return minus the reward of the greedy response to the same prompt."""

from __future__ import annotations

from dataclasses import dataclass

from hone.algorithms.advantages.chain import Chain, rewards_to_go
from hone.algorithms.advantages.estimator import Estimator, Pair, Trajectories, VerlForm
from hone.ops.masked import masked_fill_zero


@dataclass(frozen=True)
class ReMax(Estimator):
    """A_t = Σ_{s≥t} r_s − R_greedy."""

    groups = "ignored"

    @property
    def requires(self) -> tuple[str, ...]:
        return ("reward_baselines",)

    def __call__(self, batch: Trajectories) -> Pair:
        chain = Chain.of(batch.uid, batch.trajectory_id, batch.rewards)
        returns = rewards_to_go(batch.rewards, batch.mask, 1.0, chain)
        baseline = batch.column("reward_baselines").to(returns.dtype).unsqueeze(-1)
        return masked_fill_zero(returns - baseline, batch.mask), returns


remax = VerlForm("remax", ReMax)
