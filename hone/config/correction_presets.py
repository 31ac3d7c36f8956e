"""Named settings of `algorithm.rollout_correction`, as verl names them.

`RolloutCorrectionConfig.decoupled_geo_rs(rs_threshold="0.99_1.01")` makes one. "decoupled" recomputes old
log-probs, "bypass" takes the rollout's.
"""

from __future__ import annotations

from typing import TypeVar

from hone.config.errors import did_you_mean, nearest
from hone.types import Function

T = TypeVar("T")
Settings = dict[str, "str | float | bool | None"]

_IS, _RS = "rollout_is_threshold", "rollout_rs_threshold"
_LOWER = "threshold_lower"


def _weights(level: str, threshold: float | str = 2.0) -> Settings:
    return {"rollout_is": level, _IS: threshold}


def _reject(option: str, threshold: float | str) -> Settings:
    return {"rollout_rs": option, _RS: threshold}


def _bypass(loss_type: str) -> Settings:
    return {"bypass_mode": True, "loss_type": loss_type}


_OFF: Settings = {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}
_GEO = _reject("seq_mean_k1", "0.999_1.001")
_K3 = _reject("seq_mean_k3", 0.01)
_SEQUENCE, _TOKEN, _ICEPOP = _weights("sequence"), _weights("token"), _weights("token", "0.5_5.0")
_PPO, _REINFORCE = _bypass("ppo_clip"), _bypass("reinforce")

PRESETS: dict[str, Settings] = {
    "disabled": _OFF,
    "decoupled_token_is": _OFF | _TOKEN,
    "decoupled_seq_is": _OFF | _SEQUENCE,
    "decoupled_token_icepop": _OFF | _ICEPOP,
    "decoupled_seq_is_rs": _OFF | _SEQUENCE | _reject("seq_sum_k1", "0.5_2.0"),
    "decoupled_geo_rs": _OFF | _GEO,
    "decoupled_geo_rs_seq_tis": _OFF | _GEO | _SEQUENCE,
    "decoupled_geo_rs_token_tis": _OFF | _GEO | _TOKEN,
    "decoupled_k3_rs": _OFF | _K3,
    "decoupled_k3_rs_seq_tis": _OFF | _K3 | _SEQUENCE,
    "decoupled_k3_rs_token_tis": _OFF | _K3 | _TOKEN,
    "bypass_ppo_clip": _OFF | _PPO,
    "bypass_ppo_clip_geo_rs": _OFF | _PPO | _GEO,
    "bypass_ppo_clip_k3_rs": _OFF | _PPO | _K3,
    "bypass_pg_is": _OFF | _REINFORCE | _SEQUENCE,
    "bypass_pg_token_icepop": _OFF | _REINFORCE | _ICEPOP,
    "bypass_pg_geo_rs": _OFF | _REINFORCE | _GEO,
    "bypass_pg_geo_rs_seq_tis": _OFF | _REINFORCE | _GEO | _SEQUENCE,
    "bypass_pg_geo_rs_token_tis": _OFF | _REINFORCE | _GEO | _TOKEN,
}


def _arguments(settings: Settings) -> dict[str, str]:
    """verl's argument names, in verl's order, to the keys they set."""
    if settings.get(_IS) == _ICEPOP[_IS]:
        return {"threshold": _IS, _LOWER: _LOWER}
    both = _IS in settings and _RS in settings
    names = {("is_threshold" if both else "threshold"): _IS, "rs_threshold": _RS}
    return {name: key for name, key in names.items() if key in settings}


def _factory(name: str, settings: Settings) -> Function:
    arguments = _arguments(settings)

    def make(cls: type[T], *values: float | str, **named: float | str) -> T:
        given = dict(zip(arguments, values, strict=False)) | named
        if len(values) > len(arguments) or not given.keys() <= arguments.keys():
            hint = "".join(
                did_you_mean(nearest(key, arguments)) for key in named.keys() - arguments
            )
            raise TypeError(f"{name} takes {', '.join(arguments) or 'no arguments'}.{hint}")
        made = settings | {arguments[key]: value for key, value in given.items()}
        if _LOWER in arguments:
            low, high = str(settings[_IS]).split("_")
            made[_IS] = f"{given.get(_LOWER, low)}_{given.get('threshold', high)}"
        made.pop(_LOWER, None)
        return cls(**made)

    make.__name__, make.__qualname__ = name, f"RolloutCorrectionConfig.{name}"
    make.__doc__ = f"The preset {name}; arguments: {', '.join(arguments) or 'none'}."
    return make


class CorrectionPresets:
    """Class methods that make a block with a preset's settings."""


for _name, _settings in PRESETS.items():
    setattr(CorrectionPresets, _name, classmethod(_factory(_name, _settings)))
