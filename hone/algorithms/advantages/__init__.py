"""Advantage estimators by name; each returns (advantages, returns), both [B, T] and 0 outside response_mask.

An entry of TABLE is an `EstimatorFunction` (verl's form), a user's `Estimator` class, or a user's function
`fn(token_level_rewards, response_mask, index, config, **columns)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from hone.plugins import Table
from hone.types import Function, JsonValue, Settings

if TYPE_CHECKING:
    from hone.algorithms.advantages.estimator import Estimator

T = TypeVar("T")

_NAMES_BY_FILE = {
    "estimator": "grpo dr_grpo",
    "group_baseline": "grpo_passk opo gpg maxrl lite_ppo gdpo",
    "rloo": "rloo rloo_token prime_rloo",
    "returns": "gae reinforce_plus_plus reinforce_plus_plus_baseline remax",
    "optimal_token_baseline": "optimal_token_baseline tir_optimal_token_baseline",
}
_PATHS = {
    name: f"{__name__}.{file}:{name}"
    for file, names in _NAMES_BY_FILE.items()
    for name in names.split()
}

TABLE: Table[Function] = Table(
    "advantage estimator",
    _PATHS | {"grpo_vectorized": _PATHS["grpo"], "rloo_vectorized": _PATHS["rloo"]},
)


def get_estimator(name: str, config: Settings | None = None, **options: JsonValue) -> Estimator:
    """Returns the estimator of a name or of "pkg.mod:object".

    `config` is the block `algorithm`; `options` come from other blocks, and the estimator gets those that it
    declares.
    """
    from hone.algorithms.advantages.estimator import create_estimator

    return create_estimator(TABLE.get(name), config, **options)


def estimator_group_use(name: str) -> str | None:
    """Returns `Estimator.group_use` of a named estimator: how it uses the responses of one prompt."""
    entry = TABLE.get(name)
    return getattr(getattr(entry, "estimator", entry), "group_use", None)


def get_adv_estimator_fn(name: str) -> Function:
    """Returns the estimator as a function with verl's arguments; raises on an unknown name."""
    return TABLE.get(name)


def register_adv_est(name: str, needs: tuple[str, ...] = ()) -> Callable[[T], T]:
    """Decorator that registers a custom estimator; `needs` are the columns that a function reads."""

    def add(estimator: T) -> T:
        TABLE.add(name, estimator)
        if needs:
            estimator.needs = tuple(needs)  # type: ignore[attr-defined]
        return estimator

    return add
