"""Batches for the estimator tests: drawn by hypothesis, or made by hand with `batch`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from hone.algorithms.advantages import get_adv_estimator_fn

from .references import Batch

CONFIG = {
    "gamma": 0.9,
    "lam": 0.8,
    "norm_adv_by_std_in_grpo": True,
    "gdpo_reward_keys": ["rule", "style"],
    "reward_gt_coef": 3.0,
    "reward_dpo_coef": 2.0,
    "gdpo_reward_weights": [1.0, 0.5],
}
LABELS = ["a", 7, ("t", 1), "7", None]  # any hashable values, of types that have no common order


def batch(rewards: Any, mask: Any, index: Any, seed: int = 0, **config: Any) -> Batch:
    """A batch with every column some estimator reads; NaN wherever the mask is not set."""
    random = np.random.default_rng(seed)
    mask = np.array(mask, dtype=bool)
    shape = mask.shape

    def outside_is_nan(x: np.ndarray) -> np.ndarray:
        return np.where(mask, x, np.nan)

    logp = -random.exponential(1.0, shape) - 0.01
    columns = {
        "values": outside_is_nan(random.normal(size=shape)),
        "reward_baselines": random.normal(size=shape[0]),
        "old_log_probs": outside_is_nan(logp),
        "sum_pi_squared": outside_is_nan(np.exp(2 * logp) + random.uniform(0, 0.1, shape)),
        "rollout_is_weights": outside_is_nan(random.uniform(0.5, 2.0, shape)),
        "reward/rule": outside_is_nan(random.normal(size=shape)),
        "reward/implicit": outside_is_nan(random.normal(size=shape)),
        "token_level_scores": outside_is_nan(random.normal(size=shape)),
        "reward/style": outside_is_nan(random.normal(size=shape)),
    }
    labels = np.empty(len(index), dtype=object)
    labels[:] = list(index)
    rewards = outside_is_nan(np.array(rewards, dtype=np.float64))
    return Batch(rewards, mask, labels, columns, {**CONFIG, **config})


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Masks with holes and empty rows, groups of any size, scores that repeat."""
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    cells = rows * width
    mask = draw(st.lists(st.booleans(), min_size=cells, max_size=cells))
    score = st.sampled_from([0.0, 0.0, 1.0, 0.5, 2.25])  # not below 0: maxrl takes success rates
    rewards = draw(st.lists(score, min_size=cells, max_size=cells))
    index = draw(st.lists(st.sampled_from(LABELS), min_size=rows, max_size=rows))
    return batch(
        np.reshape(rewards, (rows, width)),
        np.reshape(mask, (rows, width)),
        index,
        seed=draw(st.integers(0, 99)),
        norm_adv_by_std_in_grpo=draw(st.booleans()),
    )


def run(name: str, b: Batch, **changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """Call the package's estimator on the batch."""
    columns = {key: torch.from_numpy(value) for key, value in b.columns.items()}
    advantages, returns = get_adv_estimator_fn(name)(
        token_level_rewards=torch.from_numpy(b.rewards),
        response_mask=torch.from_numpy(b.mask).long(),
        index=b.index,
        config=b.config,
        **{**columns, **changes},
    )
    return advantages.numpy(), returns.numpy()
