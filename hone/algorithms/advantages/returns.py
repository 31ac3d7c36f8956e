"""Token returns and the estimators that use them: REINFORCE++ and ReMax.

The rows of one trajectory continue in batch order: the last token of a row precedes the first token of
the next row. Returns are carried unchanged across tool tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import Estimate, Estimator, Trajectories, VerlForm
from hone.algorithms.advantages.outcome import OutcomeEstimator, Outcomes
from hone.ops.groups import Labels, factorise, factorise_pairs
from hone.ops.masked import masked_whiten, zero_outside_mask


@dataclass(frozen=True)
class Chain:
    """The order of the rows of each trajectory, which may have several rows."""

    owner: Tensor  # [B] trajectory of each row
    rank: Tensor  # [B] 0 for the first row of a trajectory, 1 for the next …
    after: Tensor  # [B] the row that continues this one; -1 for the last

    @classmethod
    def of(cls, index: Labels | None, trajectory_id: Labels | None, like: Tensor) -> Chain | None:
        """Returns None if every row is a separate trajectory."""
        if trajectory_id is None:
            return None
        rows = len(like)
        prompt = np.zeros(rows, np.int64) if index is None else factorise(index)
        owner, _ = factorise_pairs(prompt, factorise(trajectory_id))
        order = np.argsort(owner, kind="stable")  # rows of one trajectory together, in batch order
        continues = owner[order][1:] == owner[order][:-1]
        after = np.full(rows, -1, np.int64)
        after[order[:-1][continues]] = order[1:][continues]
        is_first = np.concatenate([[True], ~continues]) if rows else np.zeros(0, bool)
        position = np.arange(rows)
        rank = np.empty(rows, np.int64)
        rank[order] = position - np.maximum.accumulate(np.where(is_first, position, 0))
        return cls(*(torch.from_numpy(x).to(like.device) for x in (owner, rank, after)))

    def backwards(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (rows, the rows that continue them or -1), the last rows of trajectories first."""
        for rank in range(int(self.rank.max()) if len(self.rank) else -1, -1, -1):
            rows = (self.rank == rank).nonzero().squeeze(1)
            yield rows, self.after[rows]

    def later(self, per_row: Tensor) -> Tensor:
        """[B]: sum of `per_row` over the rows that come after this one in its trajectory."""
        out = torch.zeros_like(per_row)
        for rows, after in self.backwards():
            out[rows] = torch.where(after >= 0, out[after] + per_row[after], out[rows])
        return out

    def earlier(self, per_row: Tensor) -> Tensor:
        """[B]: sum of `per_row` over the rows that come before this one in its trajectory."""
        total = per_row.new_zeros(len(per_row)).index_add_(0, self.owner, per_row)
        return total[self.owner] - self.later(per_row) - per_row


def rewards_to_go(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float, chain: Chain | None
) -> Tensor:
    """[B, T] discounted sum of the rewards from each token on; 0 outside the mask.

    The discount applies per policy token, not per tool token.
    """
    rewards = zero_outside_mask(token_level_rewards, response_mask)
    if gamma == 1:
        returns = rewards.flip(-1).cumsum(-1).flip(-1)
        if chain is not None:
            returns = returns + chain.later(rewards.sum(-1)).unsqueeze(-1)
        return zero_outside_mask(returns, response_mask)
    returns = torch.zeros_like(rewards)
    state = rewards.new_zeros(len(rewards))  # return at each row's first token
    for rows, next_return in backward_scan(chain, state):
        returns[rows], state[rows] = _discounted(
            rewards[rows], response_mask[rows], gamma, next_return
        )
    return returns


def backward_scan(chain: Chain | None, state: Tensor) -> Iterator[tuple[Tensor | slice, Tensor]]:
    """Yields (rows, the state after their last token); the rows that continue a row come before it."""
    if chain is None:
        yield slice(None), torch.zeros_like(state)
        return
    for rows, after in chain.backwards():
        continues = (after >= 0).reshape(-1, *([1] * (state.dim() - 1)))
        yield rows, torch.where(continues, state[after], torch.zeros_like(state[rows]))


def _discounted(
    rewards: Tensor, mask: Tensor, gamma: float, next_return: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the returns [B, T] and those of the first token [B]; `next_return` follows the last."""
    policy_token = mask.bool().T
    out = torch.zeros_like(rewards.T)
    for t in range(rewards.shape[1] - 1, -1, -1):
        discounted = rewards[:, t] + gamma * next_return
        next_return = torch.where(policy_token[t], discounted, next_return)
        out[t] = next_return
    return zero_outside_mask(out.T, mask), next_return


@dataclass(frozen=True)
class ReinforcePlusPlus(Estimator):
    """G_t = r_t + γ·G_next over the policy's tokens; A = whiten(G) (2501.03262)."""

    gamma: float

    groups = "ignored"

    def __call__(self, batch: Trajectories) -> Estimate:
        chain = Chain.of(batch.uid, batch.trajectory_id, batch.rewards)
        returns = rewards_to_go(batch.rewards, batch.mask, self.gamma, chain)
        return masked_whiten(returns, batch.mask), returns


@dataclass(frozen=True)
class ReinforcePlusPlusBaseline(OutcomeEstimator):
    """A = whiten(R − mean_g) over all tokens of the batch; a group of one keeps its raw R."""

    groups = "compared"

    def advantages(self, outcome: Outcomes) -> Tensor:
        return outcome.whiten(outcome.scores - outcome.baseline())


@dataclass(frozen=True)
class ReMax(Estimator):
    """A_t = Σ_{s≥t} r_s − R_greedy (2310.10505): the greedy response to the same prompt is the baseline."""

    groups = "ignored"

    @property
    def requires(self) -> tuple[str, ...]:
        return ("reward_baselines",)

    def __call__(self, batch: Trajectories) -> Estimate:
        chain = Chain.of(batch.uid, batch.trajectory_id, batch.rewards)
        returns = rewards_to_go(batch.rewards, batch.mask, 1.0, chain)
        baseline = batch.column("reward_baselines").to(returns.dtype).unsqueeze(-1)
        return zero_outside_mask(returns - baseline, batch.mask), returns


reinforce_plus_plus = VerlForm("reinforce_plus_plus", ReinforcePlusPlus)
reinforce_plus_plus_baseline = VerlForm("reinforce_plus_plus_baseline", ReinforcePlusPlusBaseline)
remax = VerlForm("remax", ReMax)
