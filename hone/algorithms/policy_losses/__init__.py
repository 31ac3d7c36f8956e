"""Policy losses by name, callable in verl's form.

`fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)`
returns `(loss, metrics)`: this micro-batch's share of the loss (aggregation.py), and token means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hone.plugins import Table
from hone.types import Function

T = TypeVar("T")

_HERE = "hone.algorithms.policy_losses"

TABLE: Table[Function] = Table(
    "policy loss",
    {
        "vanilla": f"{_HERE}.vanilla:vanilla",
        "gspo": f"{_HERE}.sequence_ratio:gspo",
        "luspo": f"{_HERE}.sequence_ratio:luspo",
        "geo_mean": f"{_HERE}.sequence_ratio:geo_mean",
        "sapo": f"{_HERE}.sapo:sapo",
        "cispo": f"{_HERE}.cispo:cispo",
        "gpg": f"{_HERE}.reinforce:gpg",
        "reinforce": f"{_HERE}.reinforce:reinforce",
        "bypass_mode": f"{_HERE}.bypass:bypass_mode",
        "clip_cov": f"{_HERE}.covariance:clip_cov",
        "kl_cov": f"{_HERE}.covariance:kl_cov",
        "dppo_tv": f"{_HERE}.dppo:dppo_tv",
        "dppo_kl": f"{_HERE}.dppo:dppo_kl",
        "dro": f"{_HERE}.dro:dro",
    },
)


def get_policy_loss_fn(name: str) -> Function:
    """The loss of that name, or of "pkg.mod:object"; an unknown name is an error."""
    return TABLE.get(name)


def register_policy_loss(name: str) -> Callable[[T], T]:
    """Decorator that adds a user's loss to the table."""
    return TABLE.register(name)
