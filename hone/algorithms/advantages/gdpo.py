"""GDPO (2601.05242): normalise each part of the reward by itself, then add them up.

A part with a large scale then cannot drown the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.grpo import relative_to_group
from hone.algorithms.advantages.outcome import Labels, outcomes, row_sums
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


def gdpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Labels | None = None,
    config: Any = None,
    *,
    trajectory_id: Labels | None = None,
    **parts: Any,
) -> tuple[Tensor, Tensor]:
    """A = whiten(Σ_k w_k·grpo(R_k)). A part is a column [B, T], or one number a row [B]."""
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
        if name not in parts:
            have = ", ".join(key for key in parts if key.startswith(_PREFIX)) or "none"
            raise ValueError(f"gdpo: the batch has no reward part {name!r}; it has {have}")
        part = torch.as_tensor(parts[name], device=total.device)
        scores = outcome.total(row_sums(part, outcome.mask) if part.dim() == 2 else part.double())
        total = total + weight * relative_to_group(outcome.groups, scores, by_std=True)
    spread = outcome.spread(outcome.whiten(total))
    return spread, spread
