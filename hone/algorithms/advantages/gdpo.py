"""GDPO (2601.05242): normalises each reward part separately and sums the results.

A part with a large scale therefore cannot dominate the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hone.algorithms.advantages.estimator import (
    CALL_ONLY,
    Estimate,
    Estimator,
    EstimatorFunction,
    Trajectories,
    outcomes,
    row_sums,
)
from hone.algorithms.advantages.grpo import EPS, group_relative_scores
from hone.columns import REWARD_PREFIX
from hone.types import Settings


@dataclass(frozen=True)
class GDPO(Estimator):
    """A = whiten(Σ_k w_k·grpo(R_k)). R_k is a reward part, [B, T] or [B], and w_k its weight.

    Parts are columns `reward/<key>`, or `non_tensor_batch[<key>]` as in verl.
    """

    gdpo_reward_keys: tuple[str, ...] | None
    gdpo_reward_weights: tuple[float, ...] | None
    norm_adv_by_std_in_grpo: bool = field(default=True, metadata=CALL_ONLY)
    epsilon: float = EPS

    groups = "compared"

    def __post_init__(self) -> None:
        keys, weights = self.gdpo_reward_keys, self.gdpo_reward_weights
        if not keys:
            raise ValueError(
                "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys, the parts to "
                "normalise; set it, for example algorithm.gdpo_reward_keys=[acc,format]"
            )
        if weights and len(weights) != len(keys):
            raise ValueError(
                f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(keys)} "
                "algorithm.gdpo_reward_keys; give one each, or null"
            )

    @property
    def requires(self) -> tuple[str, ...]:
        keys = self.gdpo_reward_keys or ()
        return tuple(REWARD_PREFIX + str(key).removeprefix(REWARD_PREFIX) for key in keys)

    def __call__(self, batch: Trajectories) -> Estimate:
        outcome = outcomes("gdpo", batch.rewards, batch.mask, batch.uid, batch.trajectory_id)
        total = torch.zeros(len(outcome.groups.ids), dtype=torch.float64, device=batch.mask.device)
        weights = self.gdpo_reward_weights or [1.0] * len(self.requires)
        for name, weight in zip(self.requires, weights, strict=True):
            part = _reward_part(name, batch.columns).to(total.device)
            per_row = row_sums(part, outcome.mask) if part.dim() == 2 else part.double()
            total = total + weight * group_relative_scores(
                outcome.groups,
                outcome.sum_rows(per_row),
                self.norm_adv_by_std_in_grpo,
                self.epsilon,
            )
        advantages = outcome.broadcast(outcome.whiten(total))
        return advantages, advantages


def _reward_part(name: str, columns: Settings) -> Tensor:
    """Returns the column `reward/<key>`, else the column `<key>` of `non_tensor_batch`."""
    if name in columns:
        return torch.as_tensor(columns[name])
    key = name.removeprefix(REWARD_PREFIX)
    object_columns = columns.get("non_tensor_batch") or {}
    if key not in object_columns:
        available = [*(part for part in columns if part.startswith(REWARD_PREFIX)), *object_columns]
        raise ValueError(
            f"gdpo: the batch has no reward part {name!r}; it has {', '.join(available) or 'none'}. "
            f"A score function adds it by returning a dict with {key!r}"
        )
    try:
        values = torch.tensor([float(value) for value in object_columns[key]], dtype=torch.float64)
    except (TypeError, ValueError):
        values = torch.tensor([torch.nan])
    if not values.isfinite().all():
        raise ValueError(f"gdpo: column {key!r} must hold a finite number in every row")
    return values


gdpo = EstimatorFunction("gdpo", GDPO)
