"""Advantage estimators by name: `fn(token_level_rewards, response_mask, index, config, **columns)`.

Each returns `(advantages, returns)`, both [B, T] and 0 outside response_mask. The table says which
further columns an estimator reads; the trainer hands them in as keyword arguments of that name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from hone.plugins import Table, load_object, plain_name

T = TypeVar("T")

_HERE = "hone.algorithms.advantages"

TABLE = Table(
    "advantage estimator",
    {
        "gae": f"{_HERE}.gae:gae",
        "grpo": f"{_HERE}.grpo:grpo",
        "grpo_vectorized": f"{_HERE}.grpo:grpo",
        "dr_grpo": f"{_HERE}.grpo:dr_grpo",
        "grpo_passk": f"{_HERE}.passk:grpo_passk",
        "rloo": f"{_HERE}.rloo:rloo",
        "rloo_vectorized": f"{_HERE}.rloo:rloo",
        "rloo_token": f"{_HERE}.rloo_token:rloo_token",
        "opo": f"{_HERE}.opo:opo",
        "reinforce_plus_plus": f"{_HERE}.reinforce_plus_plus:reinforce_plus_plus",
        "reinforce_plus_plus_baseline": (
            f"{_HERE}.reinforce_plus_plus:reinforce_plus_plus_baseline"
        ),
        "remax": f"{_HERE}.remax:remax",
        "gpg": f"{_HERE}.gpg:gpg",
        "optimal_token_baseline": f"{_HERE}.optimal_token_baseline:optimal_token_baseline",
        "tir_optimal_token_baseline": (
            f"{_HERE}.optimal_token_baseline:tir_optimal_token_baseline"
        ),
        "gdpo": f"{_HERE}.gdpo:gdpo",
        "maxrl": f"{_HERE}.success_rate:maxrl",
        "lite_ppo": f"{_HERE}.success_rate:lite_ppo",
    },
)


@dataclass(frozen=True)
class Reads:
    """Columns an estimator reads beyond rewards, mask, uid and `trajectory_id`."""

    needs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    needs_from: str | None = None
    """"module:function" giving further needed columns from the configuration."""


_OTB = Reads(("old_log_probs", "sum_pi_squared"), optional=("rollout_is_weights",))

READS: dict[str, Reads] = {
    "gae": Reads(("values",)),
    "remax": Reads(("reward_baselines",)),
    "rloo_token": Reads(optional=("reward/process", "step_mask")),
    "optimal_token_baseline": _OTB,
    "tir_optimal_token_baseline": _OTB,
    "gdpo": Reads(needs_from=f"{_HERE}.gdpo:columns"),
}
"""Estimators that are not here read nothing more, or say so themselves in an attribute `needs`."""


def get_adv_estimator_fn(name: str) -> Callable[..., Any]:
    """The estimator of that name, or of "pkg.mod:object"; an unknown name is an error."""
    found: Callable[..., Any] = TABLE.get(name)
    return found


def register_adv_est(name: str, needs: tuple[str, ...] = ()) -> Callable[[T], T]:
    """Decorator that adds a user's estimator to the table."""

    def add(estimator: T) -> T:
        TABLE.add(name, estimator)
        if needs:
            READS[plain_name(name)] = Reads(needs)
        return estimator

    return add


def needs(name: str, config: Any = None) -> tuple[str, ...]:
    """Columns the estimator cannot do without, beyond rewards, mask and uid."""
    reads = _reads(name)
    if reads.needs_from is None:
        return reads.needs
    return reads.needs + tuple(load_object(reads.needs_from)(config))


def optional(name: str) -> tuple[str, ...]:
    """Columns the estimator uses when the batch has them. All of them use `trajectory_id`."""
    return ("trajectory_id", *_reads(name).optional)


def _reads(name: str) -> Reads:
    name = plain_name(name)
    if name in READS:
        return READS[name]
    if TABLE.is_built_in(name):
        return Reads()
    return Reads(tuple(getattr(TABLE.get(name), "needs", ())))
