"""The optimal token baseline (2602.07078): a baseline a position, weighted by gradient energy.

`optimal_token_baseline` compares tokens at the same column of the response, `tir_…` (tool-integrated
reasoning) tokens that are the n-th the policy wrote, whatever tools wrote in between.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.chain import Chain, rewards_to_go
from hone.algorithms.advantages.outcome import Labels, labels_of
from hone.algorithms.keywords import estimator
from hone.ops.groups import factorise
from hone.ops.masked import masked_fill_zero

EPS = 1e-8


@estimator
def optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    trajectory_id: Labels | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = EPS,
) -> tuple[Tensor, Tensor]:
    """B_t = Σ G·W / (Σ W + ε) over the group, W_t = Σ_{s≤t} (1 − 2π_s + Σπ²)·ρ_s²;  A = G − B.

    Where a trajectory is alone at a position (a group of one, or the tail of the longest) there is
    no baseline: its own return as baseline would always give 0. `handle_zero_tail=False` gives the
    tail that baseline all the same.
    """
    width = response_mask.shape[-1]
    chain = Chain.of(index, trajectory_id, response_mask)
    column = torch.arange(width, device=response_mask.device).expand_as(response_mask)
    if chain is not None:
        column = column + width * chain.rank.unsqueeze(-1)
    energy = _energy(response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    return _advantages(
        token_level_rewards, response_mask, index, chain, column, energy, handle_zero_tail, epsilon
    )


@estimator
def tir_optimal_token_baseline(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
    trajectory_id: Labels | None = None,
    handle_zero_tail: bool = True,
    epsilon: float = EPS,
) -> tuple[Tensor, Tensor]:
    """The same, with positions counted in tokens the policy wrote."""
    chain = Chain.of(index, trajectory_id, response_mask)
    written = response_mask.bool().long()
    nth = written.cumsum(-1)
    if chain is not None:
        nth = nth + chain.earlier(written.sum(-1)).unsqueeze(-1)
    energy = _energy(response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    return _advantages(
        token_level_rewards, response_mask, index, chain, nth, energy, handle_zero_tail, epsilon
    )


def _energy(
    mask: Tensor, old_log_probs: Tensor, sum_pi_squared: Tensor, weights: Tensor | None
) -> Tensor:
    """[B, T] squared norm of the score at each token: ‖onehot − π‖² = 1 − 2π(a) + Σπ²."""
    energy = 1 - 2 * masked_fill_zero(old_log_probs, mask).exp() + sum_pi_squared
    if weights is not None:
        energy = energy * weights**2
    return masked_fill_zero(energy, mask)


def _advantages(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None,
    chain: Chain | None,
    position: Tensor,
    energy: Tensor,
    handle_zero_tail: bool,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    index = labels_of("optimal_token_baseline", index, len(response_mask))
    returns = rewards_to_go(token_level_rewards, response_mask, 1.0, chain)
    weight = energy.cumsum(-1)
    if chain is not None:
        weight = weight + chain.earlier(energy.sum(-1)).unsqueeze(-1)
    mask = response_mask.bool()
    group = torch.from_numpy(factorise(index)).to(mask.device)
    positions = int(position.max()) + 1 if position.numel() else 1
    place = (group.unsqueeze(-1) * positions + position)[mask]  # one number a (group, position)
    g, w = returns[mask].double(), weight[mask].double()
    places = int(place.max()) + 1 if len(place) else 1
    zeros = g.new_zeros(places)
    weighted = zeros.index_add(0, place, g * w)
    weights = zeros.index_add(0, place, w)
    members = zeros.index_add(0, place, torch.ones_like(w))
    if not handle_zero_tail:  # only a group of one has no baseline
        first_rows = group if chain is None else group[chain.rank == 0]
        members = torch.bincount(first_rows)[torch.arange(places, device=mask.device) // positions]
    baseline = torch.where(members > 1, weighted / (weights + epsilon), zeros)
    advantages = torch.zeros_like(returns)
    advantages[mask] = (g - baseline[place]).to(returns.dtype)
    return advantages, returns
