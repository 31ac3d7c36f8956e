"""Advantage estimators by name: `fn(token_level_rewards, response_mask, index, config, **columns)`.

Each returns `(advantages, returns)`, both [B, T] and 0 outside response_mask. The table says which
further columns an estimator reads; the trainer hands them in as keyword arguments of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hone.algorithms.lookup import Entry, Table, load

T = TypeVar("T")

_HERE = "hone.algorithms.advantages"

_COLUMNS_OF_OTB = ("old_log_probs", "sum_pi_squared")

TABLE = Table(
    "advantage estimator",
    {
        "gae": Entry(f"{_HERE}.gae:gae", needs=("values",)),
        "grpo": Entry(f"{_HERE}.grpo:grpo"),
        "grpo_vectorized": Entry(f"{_HERE}.grpo:grpo"),
        "dr_grpo": Entry(f"{_HERE}.grpo:dr_grpo"),
        "grpo_passk": Entry(f"{_HERE}.passk:grpo_passk"),
        "rloo": Entry(f"{_HERE}.rloo:rloo"),
        "rloo_vectorized": Entry(f"{_HERE}.rloo:rloo"),
        "rloo_token": Entry(
            f"{_HERE}.rloo_token:rloo_token", optional=("reward/process", "step_mask")
        ),
        "opo": Entry(f"{_HERE}.opo:opo"),
        "reinforce_plus_plus": Entry(f"{_HERE}.reinforce_plus_plus:reinforce_plus_plus"),
        "reinforce_plus_plus_baseline": Entry(
            f"{_HERE}.reinforce_plus_plus:reinforce_plus_plus_baseline"
        ),
        "remax": Entry(f"{_HERE}.remax:remax", needs=("reward_baselines",)),
        "gpg": Entry(f"{_HERE}.gpg:gpg"),
        "optimal_token_baseline": Entry(
            f"{_HERE}.optimal_token_baseline:optimal_token_baseline",
            needs=_COLUMNS_OF_OTB,
            optional=("rollout_is_weights",),
        ),
        "tir_optimal_token_baseline": Entry(
            f"{_HERE}.optimal_token_baseline:tir_optimal_token_baseline",
            needs=_COLUMNS_OF_OTB,
            optional=("rollout_is_weights",),
        ),
        "gdpo": Entry(f"{_HERE}.gdpo:gdpo", needs_from=f"{_HERE}.gdpo:columns"),
        "maxrl": Entry(f"{_HERE}.success_rate:maxrl"),
        "lite_ppo": Entry(f"{_HERE}.success_rate:lite_ppo"),
    },
)


def get_adv_estimator_fn(name: str) -> Callable[..., Any]:
    """The estimator of that name, or of "pkg.mod:object"; an unknown name is an error."""
    return TABLE.get(name)


def register_adv_est(name: str, needs: tuple[str, ...] = ()) -> Callable[[T], T]:
    """Decorator that adds a user's estimator to the table."""
    return TABLE.register(name, needs)


def needs(name: str, config: Any = None) -> tuple[str, ...]:
    """Columns the estimator cannot do without, beyond rewards, mask and uid."""
    entry = TABLE.entry(name)
    if entry.needs_from is None:
        return entry.needs
    return entry.needs + tuple(load(entry.needs_from, TABLE.kind)(config))


def optional(name: str) -> tuple[str, ...]:
    """Columns the estimator uses when the batch has them. All of them use `trajectory_id`."""
    return ("trajectory_id", *TABLE.entry(name).optional)
