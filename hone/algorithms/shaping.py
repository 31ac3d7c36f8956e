"""PF-PPO resampling of rows, for any estimator."""

from __future__ import annotations

import torch
from torch import Tensor

_MIN_WEIGHT = 1e-8


def pf_ppo_weights(scores: Tensor, reweight_method: str, weight_pow: float) -> Tensor:
    """Returns [B] the sampling weight of each row (PF-PPO, 2409.06957).

    pow: |score|^p; max_min: 1 for the best and the worst, else 0; max_random: 0.4 for the best, 0.1
    for the others.
    """
    if reweight_method == "pow":
        weights = scores.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)
    elif reweight_method == "max_random":
        weights = torch.full_like(scores, 0.1).masked_fill(scores == scores.max(), 0.4)
    else:
        raise ValueError(
            f"algorithm.pf_ppo.reweight_method={reweight_method!r} is unknown; "
            "use pow, max_min or max_random"
        )
    return weights + _MIN_WEIGHT  # a batch of zeros can be sampled too


def pf_ppo_rows(
    scores: Tensor, reweight_method: str, weight_pow: float, generator: torch.Generator
) -> Tensor:
    """Returns [B] row indices, sampled with replacement by their weights."""
    if not len(scores):
        return torch.zeros(0, dtype=torch.long, device=scores.device)
    weights = pf_ppo_weights(scores, reweight_method, weight_pow)
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)
