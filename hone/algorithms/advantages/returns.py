"""Token returns and the estimators that use them: GAE, REINFORCE++ and ReMax.

The rows of one trajectory continue in batch order: the last token of a row precedes the first token of
the next row. Tool tokens have no reward and no discount.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import (
    GROUP_ARGUMENTS,
    Estimate,
    Estimator,
    EstimatorFunction,
    OutcomeEstimator,
    Outcomes,
    Trajectories,
)
from hone.ops.rows import Labels, factorise, factorise_pairs, masked_whiten, zero_outside_mask


@dataclass(frozen=True)
class RowOrder:
    """The order of the rows of each trajectory, which may have several rows."""

    trajectory: Tensor  # [B] index of each row's trajectory
    row_number: Tensor  # [B] 0 for the first row of a trajectory, 1 for the next …
    next_row: Tensor  # [B] the row that continues this one; -1 for the last row of a trajectory

    @classmethod
    def from_labels(
        cls, index: Labels | None, trajectory_id: Labels | None, like: Tensor
    ) -> RowOrder | None:
        """Returns the order of a batch's rows, or None if every row is a separate trajectory."""
        if trajectory_id is None:
            return None
        rows = len(like)
        prompt = np.zeros(rows, np.int64) if index is None else factorise(index)
        trajectory, _ = factorise_pairs(prompt, factorise(trajectory_id))
        order = np.argsort(trajectory, kind="stable")  # groups rows by trajectory, in batch order
        continues = trajectory[order][1:] == trajectory[order][:-1]
        next_row = np.full(rows, -1, np.int64)
        next_row[order[:-1][continues]] = order[1:][continues]
        is_first = np.concatenate([[True], ~continues]) if rows else np.zeros(0, bool)
        position = np.arange(rows)
        row_number = np.empty(rows, np.int64)
        row_number[order] = position - np.maximum.accumulate(np.where(is_first, position, 0))
        arrays = (trajectory, row_number, next_row)
        return cls(*(torch.from_numpy(x).to(like.device) for x in arrays))

    def backwards(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields rows with equal row number, highest number first, and the next row of each (-1 if none)."""
        max_rows = int(self.row_number.max()) + 1 if len(self.row_number) else 0
        for number in reversed(range(max_rows)):
            rows = (self.row_number == number).nonzero().squeeze(1)
            yield rows, self.next_row[rows]

    def sum_of_later_rows(self, per_row: Tensor) -> Tensor:
        """Returns [B] the sum of `per_row` over the rows that come after each row in its trajectory."""
        out = torch.zeros_like(per_row)
        for rows, next_rows in self.backwards():
            later = out[next_rows] + per_row[next_rows]
            out[rows] = torch.where(next_rows >= 0, later, out[rows])
        return out

    def sum_of_earlier_rows(self, per_row: Tensor) -> Tensor:
        """Returns [B] the sum of `per_row` over the rows that come before each row in its trajectory."""
        total = per_row.new_zeros(len(per_row)).index_add_(0, self.trajectory, per_row)
        return total[self.trajectory] - self.sum_of_later_rows(per_row) - per_row


def rewards_to_go(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float, row_order: RowOrder | None
) -> Tensor:
    """Returns [B, T] the rewards from each token on, summed with a discount per policy token."""
    rewards = zero_outside_mask(token_level_rewards, response_mask)
    if gamma == 1:
        returns = rewards.flip(-1).cumsum(-1).flip(-1)
        if row_order is not None:
            returns = returns + row_order.sum_of_later_rows(rewards.sum(-1)).unsqueeze(-1)
        return zero_outside_mask(returns, response_mask)
    # With λ = 1 and values of 0, the advantage of GAE is the return.
    return gae_advantages(
        rewards, torch.zeros_like(rewards), response_mask.bool(), gamma, 1.0, row_order
    )


def backward_scan(
    row_order: RowOrder | None, state: Tensor
) -> Iterator[tuple[Tensor | slice, Tensor]]:
    """Yields rows and the state after their last token; the next row of a trajectory comes before a row.

    `state` has the state at each row's first token; the caller sets it for the rows of each iteration.
    """
    if row_order is None:
        yield slice(None), torch.zeros_like(state)
        return
    for rows, next_rows in row_order.backwards():
        continues = (next_rows >= 0).reshape(-1, *([1] * (state.dim() - 1)))
        yield rows, torch.where(continues, state[next_rows], torch.zeros_like(state[rows]))


def gae_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
    row_order: RowOrder | None,
) -> Tensor:
    """Returns [B, T] A_t = δ_t + γλ·A_next, where δ_t = r_t + γ·V_next − V_t; 0 outside the mask."""
    advantages = torch.zeros_like(rewards)
    state = rewards.new_zeros(len(rewards), 2)  # value and advantage at each row's first token
    for rows, next_state in backward_scan(row_order, state):
        # Transposed to [T, B], so that each step of the scan reads contiguous memory.
        is_policy_token, r, v = (x[rows].T.contiguous() for x in (mask, rewards, values))
        next_value, advantage = next_state.unbind(-1)
        out = torch.zeros_like(r)
        for t in range(len(r) - 1, -1, -1):
            delta = r[t] + gamma * next_value - v[t]
            advantage = torch.where(is_policy_token[t], delta + gamma * lam * advantage, advantage)
            next_value = torch.where(is_policy_token[t], v[t], next_value)
            out[t] = advantage
        advantages[rows], state[rows] = out.T, torch.stack([next_value, advantage], dim=-1)
    return zero_outside_mask(advantages, mask)


@dataclass(frozen=True)
class GAE(Estimator):
    """δ_t = r_t + γ·V_next − V_t;  A_t = δ_t + γλ·A_next;  return = A + V (1506.02438).

    r is the reward, V the value, and `next` the next policy token. Advantages are then whitened.
    """

    gamma: float
    lam: float

    group_use = "ignored"
    requires = ("values",)

    def __call__(self, batch: Trajectories) -> Estimate:
        mask = batch.mask.bool()
        rewards = zero_outside_mask(batch.rewards, mask)
        values = zero_outside_mask(batch.column("values"), mask)
        row_order = RowOrder.from_labels(batch.uid, batch.trajectory_id, rewards)
        advantages = gae_advantages(rewards, values, mask, self.gamma, self.lam, row_order)
        return masked_whiten(advantages, mask), advantages + values


@dataclass(frozen=True)
class ReinforcePlusPlus(Estimator):
    """G_t = r_t + γ·G_next, where `next` is the next policy token; A = whiten(G) (2501.03262)."""

    gamma: float

    group_use = "ignored"

    def __call__(self, batch: Trajectories) -> Estimate:
        row_order = RowOrder.from_labels(batch.uid, batch.trajectory_id, batch.rewards)
        returns = rewards_to_go(batch.rewards, batch.mask, self.gamma, row_order)
        return masked_whiten(returns, batch.mask), returns


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(OutcomeEstimator):
    """A = whiten(R − mean_g) over all tokens of the batch; a group of one keeps its raw R."""

    group_use = "compared"

    def advantages(self, outcome: Outcomes) -> Tensor:
        return outcome.whiten(outcome.scores - outcome.baseline())


@dataclass(frozen=True)
class ReMax(Estimator):
    """A_t = Σ_{s≥t} r_s − R_greedy (2310.10505): the greedy response to the same prompt is the baseline."""

    group_use = "ignored"

    requires = ("reward_baselines",)

    def __call__(self, batch: Trajectories) -> Estimate:
        row_order = RowOrder.from_labels(batch.uid, batch.trajectory_id, batch.rewards)
        returns = rewards_to_go(batch.rewards, batch.mask, 1.0, row_order)
        baseline = batch.column("reward_baselines").to(returns.dtype).unsqueeze(-1)
        return zero_outside_mask(returns - baseline, batch.mask), returns


gae = EstimatorFunction("gae", GAE, "token_level_rewards values response_mask gamma lam")
reinforce_plus_plus = EstimatorFunction(
    "reinforce_plus_plus", ReinforcePlusPlus, "token_level_rewards response_mask config index"
)
reinforce_plus_plus_baseline = EstimatorFunction(
    "reinforce_plus_plus_baseline", ReinforcePlusPlusBaseline, f"{GROUP_ARGUMENTS} epsilon config"
)
remax = EstimatorFunction(
    "remax", ReMax, "token_level_rewards reward_baselines response_mask config index"
)
