"""Scores and advantages per trajectory, shared by all outcome estimators.

A trajectory is usually one row. If several rows have the same `trajectory_id`, their rewards and
lengths are summed, statistics count the trajectory once, and each of its rows gets the trajectory's
advantage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import Estimate, Estimator, Trajectories
from hone.ops.groups import Groups, Labels, factorise, factorise_pairs
from hone.ops.masked import WHITEN_EPS, count_kept, masked_sum

_BLOCK = 256  # rows


@dataclass(frozen=True)
class Outcomes:
    """Totals of N trajectories and their groups."""

    rewards: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool
    rows: Tensor | None  # [B] trajectory of each row; None when each row is its own
    groups: Groups  # of the N trajectories

    @cached_property
    def scores(self) -> Tensor:
        """[N] float64: reward summed over the response mask."""
        return self.total(row_sums(self.rewards, self.mask))

    @cached_property
    def lengths(self) -> Tensor:
        """[N] float64: number of policy tokens."""
        return self.total(count_kept(self.mask, -1).double())

    def total(self, per_row: Tensor) -> Tensor:
        """[B] → [N]: sums over the rows of each trajectory."""
        if self.rows is None:
            return per_row
        return per_row.new_zeros(len(self.groups.ids)).index_add_(0, self.rows, per_row)

    def baseline(self) -> Tensor:
        """[N] mean score of the group; 0 for a group of one, which keeps its raw score."""
        mean = self.groups.mean(self.scores)[self.groups.ids]
        return mean.masked_fill(self.groups.singleton, 0.0)

    def whiten(self, per_trajectory: Tensor) -> Tensor:
        """[N] → [N]: whitens over all tokens, where each token has the value of its trajectory."""
        lengths = self.lengths
        tokens = lengths.sum()
        centered = per_trajectory - (per_trajectory * lengths).sum() / tokens.clamp(min=1)
        variance = (centered**2 * lengths).sum() / (tokens - 1).clamp(min=1)
        return centered * torch.rsqrt(variance + WHITEN_EPS)

    def broadcast(self, per_trajectory: Tensor) -> Tensor:
        """[N] → [B, T]: the trajectory's value on each policy token, 0 elsewhere."""
        per_row = per_trajectory if self.rows is None else per_trajectory[self.rows]
        per_row = per_row.to(self.rewards.dtype).unsqueeze(-1)
        out = torch.empty_like(self.rewards)
        for start in range(0, len(out), _BLOCK):
            block = slice(start, start + _BLOCK)
            out[block].copy_(self.mask[block].view(torch.uint8)).mul_(per_row[block])
        return out


@dataclass(frozen=True)
class OutcomeEstimator(Estimator):
    """An estimator with one advantage per trajectory, the same on each of its tokens."""

    def advantages(self, outcome: Outcomes) -> Tensor:
        """[N] advantages from the outcomes of N trajectories."""
        raise NotImplementedError(f"{type(self).__name__} must define advantages")

    def __call__(self, batch: Trajectories) -> Estimate:
        name = type(self).__name__
        outcome = outcomes(name, batch.rewards, batch.mask, batch.uid, batch.trajectory_id)
        advantages = outcome.broadcast(self.advantages(outcome))
        return advantages, advantages


def outcomes(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None,
    trajectory_id: Labels | None,
) -> Outcomes:
    """Returns the trajectories of a batch, grouped by `index` (the prompt's uid)."""
    index, device = checked_labels(name, index, len(response_mask)), response_mask.device
    mask = response_mask.bool()
    if trajectory_id is None:
        return Outcomes(token_level_rewards, mask, None, Groups.of(index, device))
    prompt = factorise(index)
    trajectory, first = factorise_pairs(prompt, factorise(trajectory_id))
    rows = torch.from_numpy(trajectory).to(device)
    return Outcomes(token_level_rewards, mask, rows, Groups.of(prompt[first], device))


def checked_labels(name: str, index: Labels | None, rows: int) -> Labels:
    """Returns `index`; raises unless it has one label per row."""
    if index is None:
        raise ValueError(
            f"{name} compares the responses of one prompt and got index=None; "
            "pass the batch's uid column"
        )
    if len(index) != rows:
        raise ValueError(f"{name}: index has {len(index)} labels for {rows} rows")
    return index


def row_sums(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] → [B] float64: the sum over the mask."""
    sums = x.new_empty(len(x))
    # Blocks share one buffer, which stays in the CPU cache; torch is slow on bool masks.
    buffer = x.new_empty(_BLOCK, x.shape[-1])
    for start in range(0, len(x), _BLOCK):
        block = slice(start, min(start + _BLOCK, len(x)))
        masked = buffer[: block.stop - start].copy_(mask[block].view(torch.uint8))
        torch.sum(masked.mul_(x[block]), -1, out=sums[block])
    if not sums.isfinite().all():  # 0 · NaN is NaN, so masked entries are replaced
        sums = masked_sum(x, mask, -1)
    return sums.double()
