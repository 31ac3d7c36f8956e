"""GDPO (2601.05242): normalise each part of the reward by itself, then add them up.

A part with a large scale then cannot drown the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.grpo import EPS, relative_to_group
from hone.algorithms.advantages.outcome import Labels, outcomes, row_sums
from hone.algorithms.keywords import estimator
from hone.algorithms.settings import setting

_PREFIX = "reward/"


def columns(config: Any) -> tuple[str, ...]:
    """The reward parts named by `algorithm.gdpo_reward_keys`, as columns."""
    keys = setting(config, "gdpo_reward_keys", "algorithm")
    if not keys:
        raise ValueError(
            "gdpo normalises reward parts one by one and algorithm.gdpo_reward_keys names none; "
            "set it, for example algorithm.gdpo_reward_keys=[acc,format]"
        )
    return tuple(_PREFIX + str(key).removeprefix(_PREFIX) for key in keys)


@estimator
def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    trajectory_id: Labels | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = EPS,
    non_tensor_batch: Mapping[str, Any] | None = None,
    **parts: Any,
) -> tuple[Tensor, Tensor]:
    """A = whiten(Σ_k w_k·grpo(R_k)). A part is a column [B, T], or one number per row [B].

    Parts come as keywords `reward/<key>`, or as `non_tensor_batch[<key>]`, as verl hands them over.
    """
    names = columns(config)
    weights = setting(config, "gdpo_reward_weights", "algorithm") or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(
            f"algorithm.gdpo_reward_weights has {len(weights)} numbers for {len(names)} "
            "gdpo_reward_keys; give one each"
        )
    outcome = outcomes("gdpo", token_level_rewards, response_mask, index, trajectory_id)
    total = torch.zeros(len(outcome.groups.ids), dtype=torch.float64, device=response_mask.device)
    for name, weight in zip(names, weights, strict=True):
        part = _part(name, parts, non_tensor_batch).to(total.device)
        scores = outcome.total(row_sums(part, outcome.mask) if part.dim() == 2 else part.double())
        total = total + weight * relative_to_group(
            outcome.groups, scores, norm_adv_by_std_in_grpo, epsilon
        )
    spread = outcome.spread(outcome.whiten(total))
    return spread, spread


def _part(name: str, parts: Mapping[str, Any], rows: Mapping[str, Any] | None) -> Tensor:
    """The reward part: a keyword `reward/<key>`, else the object column `<key>` of the batch."""
    if name in parts:
        return torch.as_tensor(parts[name])
    key = name.removeprefix(_PREFIX)
    if rows is None or key not in rows:
        have = [*(part for part in parts if part.startswith(_PREFIX)), *(rows or ())]
        raise ValueError(
            f"gdpo: the batch has no reward part {name!r}; it has {', '.join(have) or 'none'}. "
            f"A score function gives it by returning a dict with {key!r}"
        )
    try:
        numbers = torch.tensor([float(value) for value in rows[key]], dtype=torch.float64)
    except (TypeError, ValueError):
        numbers = torch.tensor([torch.nan])
    if not numbers.isfinite().all():
        raise ValueError(f"gdpo: column {key!r} must hold a finite number in every row")
    return numbers
