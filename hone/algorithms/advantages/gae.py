"""Generalised advantage estimation over the policy tokens (1506.02438).

Tool and padding tokens are skipped: the next token of a policy token is the next policy token.
If a trajectory has several rows, the estimate continues at the first token of its next row.
Advantages are whitened over the batch; returns are computed before whitening.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import (
    Estimate,
    Estimator,
    EstimatorFunction,
    Trajectories,
)
from hone.algorithms.advantages.returns import RowOrder, backward_scan
from hone.ops.masked import masked_whiten, zero_outside_mask


@dataclass(frozen=True)
class GAE(Estimator):
    """δ_t = r_t + γ·V_next − V_t;  A_t = δ_t + γλ·A_next;  return = A + V.

    r is the reward, V the value, and `next` the next policy token.
    """

    gamma: float
    lam: float

    groups = "ignored"

    @property
    def requires(self) -> tuple[str, ...]:
        return ("values",)

    def __call__(self, batch: Trajectories) -> Estimate:
        mask = batch.mask.bool()
        rewards = zero_outside_mask(batch.rewards, mask)
        values = zero_outside_mask(batch.column("values"), mask)
        advantages = torch.zeros_like(rewards)
        state = rewards.new_zeros(len(rewards), 2)  # value and advantage at each row's first token
        row_order = RowOrder.from_labels(batch.uid, batch.trajectory_id, rewards)
        for rows, next_state in backward_scan(row_order, state):
            advantages[rows], state[rows] = _gae_scan(
                rewards[rows], values[rows], mask[rows], self.gamma, self.lam, next_state
            )
        raw_advantages = zero_outside_mask(advantages, mask)
        return masked_whiten(raw_advantages, mask), raw_advantages + values


def _gae_scan(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, next_state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns advantages [B, T] and the state [B, 2] at each row's first token.

    `next_state` [B, 2] is the state after each row's last token.
    """
    # Transposed to [T, B], so that each step of the scan reads contiguous memory.
    is_policy_token, r, v = (x.T.contiguous() for x in (mask, rewards, values))
    next_value, advantage = next_state.unbind(-1)
    out = torch.zeros_like(r)
    for t in range(len(r) - 1, -1, -1):
        delta = r[t] + gamma * next_value - v[t]
        advantage = torch.where(is_policy_token[t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(is_policy_token[t], v[t], next_value)
        out[t] = advantage
    return out.T, torch.stack([next_value, advantage], dim=-1)


gae = EstimatorFunction("gae", GAE)  # a function with verl's signature
