"""ReMax (2310.10505): return minus the reward of the greedy response to the same prompt."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hone.algorithms.advantages.chain import Chain, rewards_to_go
from hone.algorithms.advantages.outcome import Labels
from hone.algorithms.keywords import estimator
from hone.ops.masked import masked_fill_zero


@estimator
def remax(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    reward_baselines: Tensor,
    trajectory_id: Labels | None = None,
) -> tuple[Tensor, Tensor]:
    """A_t = Σ_{s≥t} r_s − R_greedy."""
    chain = Chain.of(index, trajectory_id, token_level_rewards)
    returns = rewards_to_go(token_level_rewards, response_mask, 1.0, chain)
    baseline = reward_baselines.to(returns.dtype).unsqueeze(-1)
    return masked_fill_zero(returns - baseline, response_mask), returns
