"""Keyword arguments of estimators and losses: a misspelt one is an error, never ignored.

A column that another estimator reads may be handed to any of them: columns are data, not settings.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from hone.columns import REWARD_PREFIX
from hone.config.errors import did_you_mean, nearest

Function = TypeVar("Function", bound=Callable[..., Any])

_COLUMNS = frozenset(
    {
        "values",
        "reward_baselines",
        "old_log_probs",
        "sum_pi_squared",
        "rollout_is_weights",
        "step_mask",
        "trajectory_id",
        "non_tensor_batch",
        "batch",
    }
)
"""What some estimator reads; the last two are how verl hands over a whole batch."""


def refuse_unknown(function: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError for the first unknown keyword, with the known one most like it."""
    names = list(known)
    for name in unknown:
        raise TypeError(
            f"{function} takes no argument {name!r}.{did_you_mean(nearest(name, names))} "
            f"It takes {', '.join(names)}"
        )


def _refuse_verls_order(function: str, args: tuple[Any, ...]) -> None:
    """Raise TypeError for positions that mean something else in verl: they would be ignored here."""
    index, config = (*args, None, None, None, None)[2:4]
    if isinstance(index, Mapping) or isinstance(config, int | float):
        raise TypeError(
            f"{function} takes (token_level_rewards, response_mask, index, config); got "
            f"{type(index).__name__} as index and {type(config).__name__} as config. Name the "
            "arguments, or call verl's form in hone.trainer.ppo.core_algos"
        )


def estimator(function: Function) -> Function:
    """Hand on the keywords that `function` takes, drop other columns, refuse the rest."""
    parameters = inspect.signature(function).parameters.values()
    known = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    takes_columns = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def is_column(name: str) -> bool:
        return name in _COLUMNS or name.startswith(REWARD_PREFIX)

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        _refuse_verls_order(function.__name__, args)
        others = [name for name in keywords if name not in known]
        refuse_unknown(function.__name__, (n for n in others if not is_column(n)), known)
        if not takes_columns:
            keywords = {name: value for name, value in keywords.items() if name in known}
        return function(*args, **keywords)

    return call  # type: ignore[return-value]
