"""Policy losses by name.

`fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)` returns
`(loss, metrics)`: this micro-batch's share of the loss, and the metrics as means over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hone.plugins import Table, check_parameters
from hone.types import Function

T = TypeVar("T")

_NAMES_BY_FILE = {
    "policy_loss": "vanilla",
    "ratio": "gspo luspo geo_mean sapo cispo gpg reinforce dppo_tv dppo_kl dro",
    "bypass": "bypass_mode",
    "covariance": "clip_cov kl_cov",
}

TABLE: Table[Function] = Table(
    "policy loss",
    {
        name: f"{__name__}.{file}:{name}"
        for file, names in _NAMES_BY_FILE.items()
        for name in names.split()
    },
)


LOSS_ARGUMENTS = (
    *("old_log_prob", "log_prob", "advantages", "response_mask"),
    *("loss_agg_mode", "config", "rollout_is_weights"),
)
"""verl's names for the arguments of a loss, in verl's order."""


def get_policy_loss_fn(name: str) -> Function:
    """Returns the loss of a name or of "pkg.mod:object"; raises on an unknown name or unknown parameters."""
    loss: Function = TABLE.get(name)
    check_parameters("policy loss", loss, LOSS_ARGUMENTS)
    return loss


def register_policy_loss(name: str) -> Callable[[T], T]:
    """Decorator that registers a custom loss."""
    return TABLE.register(name)
