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
from hone.ops.masked import WHITEN_EPS, count_unmasked, masked_sum

_BLOCK_ROWS = 256


@dataclass(frozen=True)
class Outcomes:
    """The scores and lengths of N trajectories, and their groups."""

    rewards: Tensor  # [B, T]
    mask: Tensor  # [B, T] bool
    row_trajectory: Tensor | None  # [B] index of each row's trajectory; None if each row is one
    groups: Groups  # of the N trajectories

    @cached_property
    def scores(self) -> Tensor:
        """The sum of rewards over the response mask, [N] float64."""
        return self.sum_rows(row_sums(self.rewards, self.mask))

    @cached_property
    def lengths(self) -> Tensor:
        """The number of policy tokens, [N] float64."""
        return self.sum_rows(count_unmasked(self.mask, -1).double())

    def sum_rows(self, per_row: Tensor) -> Tensor:
        """Returns [N] the sums of `per_row` [B] over the rows of each trajectory."""
        if self.row_trajectory is None:
            return per_row
        return per_row.new_zeros(len(self.groups.ids)).index_add_(0, self.row_trajectory, per_row)

    def baseline(self) -> Tensor:
        """Returns [N] the mean score of the group, or 0 for a group of one, which keeps its raw score."""
        mean = self.groups.mean(self.scores)[self.groups.ids]
        return mean.masked_fill(self.groups.is_singleton, 0.0)

    def whiten(self, per_trajectory: Tensor) -> Tensor:
        """Whitens values [N] by their mean and variance over all tokens of the trajectories."""
        lengths = self.lengths
        tokens = lengths.sum()
        centered = per_trajectory - (per_trajectory * lengths).sum() / tokens.clamp(min=1)
        variance = (centered**2 * lengths).sum() / (tokens - 1).clamp(min=1)
        return centered * torch.rsqrt(variance + WHITEN_EPS)

    def broadcast(self, per_trajectory: Tensor) -> Tensor:
        """Returns [B, T] the trajectory's value on each policy token, and 0 elsewhere."""
        per_row = (
            per_trajectory if self.row_trajectory is None else per_trajectory[self.row_trajectory]
        )
        per_row = per_row.to(self.rewards.dtype).unsqueeze(-1)
        out = torch.empty_like(self.rewards)
        for start in range(0, len(out), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            out[block].copy_(self.mask[block].view(torch.uint8)).mul_(per_row[block])
        return out


@dataclass(frozen=True)
class OutcomeEstimator(Estimator):
    """An estimator with one advantage per trajectory, the same on each of its tokens."""

    def advantages(self, outcome: Outcomes) -> Tensor:
        """Returns the advantages [N] of N trajectories."""
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
    """Returns the outcomes of a batch's trajectories, grouped by `index` (the prompt's uid)."""
    index, device = checked_labels(name, index, len(response_mask)), response_mask.device
    mask = response_mask.bool()
    if trajectory_id is None:
        return Outcomes(token_level_rewards, mask, None, Groups.of(index, device))
    prompt = factorise(index)
    trajectory, first_rows = factorise_pairs(prompt, factorise(trajectory_id))
    row_trajectory = torch.from_numpy(trajectory).to(device)
    return Outcomes(
        token_level_rewards, mask, row_trajectory, Groups.of(prompt[first_rows], device)
    )


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
    """Returns [B] float64, the sums of x [B, T] over the mask."""
    sums = x.new_empty(len(x))
    # Blocks share one buffer, which stays in the CPU cache; torch is slow on bool masks.
    buffer = x.new_empty(_BLOCK_ROWS, x.shape[-1])
    for start in range(0, len(x), _BLOCK_ROWS):
        block = slice(start, min(start + _BLOCK_ROWS, len(x)))
        masked_block = buffer[: block.stop - start].copy_(mask[block].view(torch.uint8))
        torch.sum(masked_block.mul_(x[block]), -1, out=sums[block])
    if not sums.isfinite().all():  # 0 · NaN is NaN; masked_sum replaces masked entries
        sums = masked_sum(x, mask, -1)
    return sums.double()
