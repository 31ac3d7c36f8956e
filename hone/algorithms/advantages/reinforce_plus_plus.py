"""REINFORCE++ (2501.03262): token returns whitened over the batch; and its form with group means.

The return is carried unchanged across tool tokens, so that a search or a program's output between
two turns does not cut the first turn off from the reward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hone.algorithms.advantages.chain import Chain, rewards_to_go
from hone.algorithms.advantages.outcome import Labels, outcomes
from hone.algorithms.keywords import estimator
from hone.algorithms.settings import setting
from hone.ops.masked import masked_whiten


@estimator
def reinforce_plus_plus(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    trajectory_id: Labels | None = None,
    gamma: float | None = None,
) -> tuple[Tensor, Tensor]:
    """G_t = r_t + γ·G_next over the policy's tokens;  A = whiten(G)."""
    gamma = setting(config, "gamma", "algorithm") if gamma is None else gamma
    chain = Chain.of(index, trajectory_id, token_level_rewards)
    returns = rewards_to_go(token_level_rewards, response_mask, gamma, chain)
    return masked_whiten(returns, response_mask), returns


@estimator
def reinforce_plus_plus_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    trajectory_id: Labels | None = None,
) -> tuple[Tensor, Tensor]:
    """A = whiten(R − mean_g) over all tokens of the batch; a group of one enters with its raw R."""
    outcome = outcomes(
        "reinforce_plus_plus_baseline", token_level_rewards, response_mask, index, trajectory_id
    )
    spread = outcome.spread(outcome.whiten(outcome.scores - outcome.baseline()))
    return spread, spread
