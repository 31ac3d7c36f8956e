"""The optimal token baseline (2602.07078): a baseline per position, weighted by gradient energy.

`optimal_token_baseline` compares tokens at the same position of the response; `tir_…` (tool-integrated
reasoning) compares the n-th policy tokens and does not count tool tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import (
    GROUP_ARGUMENTS,
    Estimate,
    Estimator,
    EstimatorFunction,
    Trajectories,
    checked_labels,
)
from hone.algorithms.advantages.returns import RowOrder, rewards_to_go
from hone.ops.rows import factorise, zero_outside_mask

EPS = 1e-8


@dataclass(frozen=True)
class OptimalTokenBaseline(Estimator):
    """B_t = Σ G·W / (Σ W + ε) over the group, W_t = Σ_{s≤t} (1 − 2π_s + Σπ²)·ρ_s²;  A = G − B.

    G is the return, π the probability of a token under the policy, ρ the rollout importance weight.
    Where only one response of a group has a token, the baseline is 0 (A = G). With `handle_zero_tail=False`,
    such a token has its own return as baseline (A ≈ 0), except in a group of one.
    """

    handle_zero_tail: bool = True
    epsilon: float = EPS

    uses = ("rollout_is_weights",)
    group_use = "compared"  # a group of one keeps its raw return

    requires = ("old_log_probs", "sum_pi_squared")

    def position(self, mask: Tensor, row_order: RowOrder | None) -> Tensor:
        """Returns [B, T]: each token's index in the response; tokens of a group are compared per index."""
        width = mask.shape[-1]
        index = torch.arange(width, device=mask.device).expand_as(mask)
        return index if row_order is None else index + width * row_order.row_number.unsqueeze(-1)

    def __call__(self, batch: Trajectories) -> Estimate:
        response_mask = batch.mask
        row_order = RowOrder.from_labels(batch.uid, batch.trajectory_id, response_mask)
        position = self.position(response_mask, row_order)
        # Squared norm of the gradient of log π(a) by the logits: ‖onehot − π‖² = 1 − 2π(a) + Σπ².
        log_probs = zero_outside_mask(batch.column("old_log_probs"), response_mask)
        energy = 1 - 2 * log_probs.exp() + batch.column("sum_pi_squared")
        if (importance_weights := batch.columns.get("rollout_is_weights")) is not None:
            energy = energy * importance_weights**2
        energy = zero_outside_mask(energy, response_mask)
        labels = checked_labels("optimal_token_baseline", batch.uid, len(response_mask))
        returns = rewards_to_go(batch.rewards, response_mask, 1.0, row_order)
        cumulative_energy = energy.cumsum(-1)
        if row_order is not None:
            earlier_energy = row_order.sum_of_earlier_rows(energy.sum(-1))
            cumulative_energy = cumulative_energy + earlier_energy.unsqueeze(-1)
        mask = response_mask.bool()
        group_of_row = torch.from_numpy(factorise(labels)).to(mask.device)
        num_positions = int(position.max()) + 1 if position.numel() else 1
        # The tokens of a group at the same position share a cell.
        cell = (group_of_row.unsqueeze(-1) * num_positions + position)[mask]
        g, w = returns[mask].double(), cumulative_energy[mask].double()
        num_cells = int(cell.max()) + 1 if len(cell) else 1
        zeros = g.new_zeros(num_cells)
        weighted_returns = zeros.index_add(0, cell, g * w)
        weight_sums = zeros.index_add(0, cell, w)
        member_counts = zeros.index_add(0, cell, torch.ones_like(w))
        if not self.handle_zero_tail:  # the baseline is 0 only in a group of one
            group_of_trajectory = group_of_row
            if row_order is not None:
                group_of_trajectory = group_of_row[row_order.row_number == 0]
            group_of_cell = torch.arange(num_cells, device=mask.device) // num_positions
            member_counts = torch.bincount(group_of_trajectory)[group_of_cell]
        baseline = torch.where(
            member_counts > 1, weighted_returns / (weight_sums + self.epsilon), zeros
        )
        advantages = torch.zeros_like(returns)
        advantages[mask] = (g - baseline[cell]).to(returns.dtype)
        return advantages, returns


@dataclass(frozen=True)
class TIROptimalTokenBaseline(OptimalTokenBaseline):
    """The optimal token baseline, with positions counted in policy tokens."""

    def position(self, mask: Tensor, row_order: RowOrder | None) -> Tensor:
        is_policy_token = mask.bool().long()
        count = is_policy_token.cumsum(-1)
        if row_order is None:
            return count
        return count + row_order.sum_of_earlier_rows(is_policy_token.sum(-1)).unsqueeze(-1)


_ARGUMENTS = (
    f"{GROUP_ARGUMENTS} old_log_probs sum_pi_squared "
    "rollout_is_weights handle_zero_tail epsilon config"
)
optimal_token_baseline = EstimatorFunction(
    "optimal_token_baseline", OptimalTokenBaseline, _ARGUMENTS
)
tir_optimal_token_baseline = EstimatorFunction(
    "tir_optimal_token_baseline", TIROptimalTokenBaseline, _ARGUMENTS
)
