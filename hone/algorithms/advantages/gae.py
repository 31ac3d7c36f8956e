"""Generalised advantage estimation over the policy tokens (1506.02438).

Tool and padding tokens are skipped: the next token of a policy token is the next policy token.
Advantages are whitened over the batch; returns are computed before whitening.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import Estimator, Pair, Trajectories, VerlForm
from hone.algorithms.advantages.returns import Chain, starts
from hone.ops.masked import masked_fill_zero, masked_whiten


@dataclass(frozen=True)
class GAE(Estimator):
    """δ_t = r_t + γ·V_next − V_t;  A_t = δ_t + γλ·A_next;  return = A + V."""

    gamma: float
    lam: float

    groups = "ignored"

    @property
    def requires(self) -> tuple[str, ...]:
        return ("values",)

    def __call__(self, batch: Trajectories) -> Pair:
        mask = batch.mask.bool()
        rewards = masked_fill_zero(batch.rewards, mask)
        values = masked_fill_zero(batch.column("values"), mask)
        advantages = torch.zeros_like(rewards)
        state = rewards.new_zeros(len(rewards), 2)  # value and advantage at each row's first token
        for rows, beyond in starts(Chain.of(batch.uid, batch.trajectory_id, rewards), state):
            advantages[rows], state[rows] = _scan(
                rewards[rows], values[rows], mask[rows], self.gamma, self.lam, beyond
            )
        raw = masked_fill_zero(advantages, mask)
        return masked_whiten(raw, mask), raw + values


def _scan(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, beyond: Tensor
) -> tuple[Tensor, Tensor]:
    """Computes the recurrence for all rows; `beyond` [B, 2] is the state after the last token."""
    policy_token, r, v = (
        x.T.contiguous() for x in (mask, rewards, values)
    )  # [T, B]: each step is contiguous
    next_value, carried = beyond.unbind(-1)
    out = torch.zeros_like(r)
    for t in range(len(r) - 1, -1, -1):
        delta = r[t] + gamma * next_value - v[t]
        carried = torch.where(policy_token[t], delta + gamma * lam * carried, carried)
        next_value = torch.where(policy_token[t], v[t], next_value)
        out[t] = carried
    return out.T, torch.stack([next_value, carried], dim=-1)


gae = VerlForm("gae", GAE)
