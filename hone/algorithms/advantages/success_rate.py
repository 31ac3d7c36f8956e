"""Two recent ways to scale a group-centred score: by the group's mean (MaxRL), by the batch's
deviation (Lite-PPO). Both take the true mean of a group, so a group of one gets 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hone.algorithms.advantages.estimator import Estimator, Pair, Trajectories, VerlForm
from hone.algorithms.advantages.grpo import EPS
from hone.algorithms.advantages.outcome import outcomes


@dataclass(frozen=True)
class MaxRL(Estimator):
    """A = (R − mean_g)/(mean_g + ε) (2602.02710): the rarer success is, the more it counts.

    The mean stands for a success rate, so scores must not be negative.
    """

    groups = "required"

    def __call__(self, batch: Trajectories) -> Pair:
        outcome = outcomes("maxrl", batch.rewards, batch.mask, batch.uid, batch.trajectory_id)
        groups, scores = outcome.groups, outcome.scores
        if (scores < 0).any():
            raise ValueError(
                f"maxrl divides by the mean score of a group, so scores must be 0 or more; got "
                f"{float(scores.min()):g}. Use rewards such as 0/1 and put the KL in the loss "
                "(algorithm.use_kl_in_reward=false, actor_rollout_ref.actor.use_kl_loss=true)"
            )
        mean = groups.mean(scores)[groups.ids]
        spread = outcome.spread((scores - mean) / (mean + EPS))
        return spread, spread


@dataclass(frozen=True)
class LitePPO(Estimator):
    """A = (R − mean_g)/(std_batch + ε) (2508.08221), std unbiased over the batch's trajectories."""

    groups = "required"

    def __call__(self, batch: Trajectories) -> Pair:
        outcome = outcomes("lite_ppo", batch.rewards, batch.mask, batch.uid, batch.trajectory_id)
        groups, scores = outcome.groups, outcome.scores
        std = torch.std(scores) if len(scores) > 1 else scores.new_zeros(())
        spread = outcome.spread((scores - groups.mean(scores)[groups.ids]) / (std + EPS))
        return spread, spread


maxrl = VerlForm("maxrl", MaxRL)
lite_ppo = VerlForm("lite_ppo", LitePPO)
