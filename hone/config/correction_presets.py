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

_IS, _RS, _LOWER = "rollout_is_threshold", "rollout_rs_threshold", "threshold_lower"
_SEQUENCE: Settings = {"rollout_is": "sequence", _IS: 2.0}
_TOKEN: Settings = {"rollout_is": "token", _IS: 2.0}
_PARTS: dict[str, Settings] = {
    "": {"rollout_is": None, "rollout_rs": None, "bypass_mode": False},
    "bypass_ppo_clip": {"bypass_mode": True, "loss_type": "ppo_clip"},
    "bypass_pg": {"bypass_mode": True, "loss_type": "reinforce"},
    "token_is": _TOKEN,
    "token_tis": _TOKEN,
    "token_icepop": _TOKEN | {_IS: "0.5_5.0"},
    "pg_is": _SEQUENCE,
    "seq_is": _SEQUENCE,
    "seq_tis": _SEQUENCE,
    "seq_is_rs": {"rollout_rs": "seq_sum_k1", _RS: "0.5_2.0"},
    "geo_rs": {"rollout_rs": "seq_mean_k1", _RS: "0.999_1.001"},
    "k3_rs": {"rollout_rs": "seq_mean_k3", _RS: 0.01},
}
"""What each part of a preset's name sets."""
_NAMES = """
    disabled decoupled_token_is decoupled_seq_is decoupled_token_icepop decoupled_seq_is_rs
    decoupled_geo_rs decoupled_geo_rs_seq_tis decoupled_geo_rs_token_tis
    decoupled_k3_rs decoupled_k3_rs_seq_tis decoupled_k3_rs_token_tis
    bypass_ppo_clip bypass_ppo_clip_geo_rs bypass_ppo_clip_k3_rs bypass_pg_is bypass_pg_token_icepop
    bypass_pg_geo_rs bypass_pg_geo_rs_seq_tis bypass_pg_geo_rs_token_tis
"""
PRESETS: dict[str, Settings] = {
    name: {key: v for part, values in _PARTS.items() if part in name for key, v in values.items()}
    for name in _NAMES.split()
}


def _arguments(name: str) -> dict[str, str]:
    """verl's argument names, in verl's order, to the keys they set."""
    if name.endswith("icepop"):
        return {"threshold": _IS, _LOWER: _LOWER}
    both = _IS in PRESETS[name] and _RS in PRESETS[name]
    names = {("is_threshold" if both else "threshold"): _IS, "rs_threshold": _RS}
    return {argument: key for argument, key in names.items() if key in PRESETS[name]}


def _factory(name: str) -> Function:
    arguments, settings = _arguments(name), PRESETS[name]

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


for _name in PRESETS:
    setattr(CorrectionPresets, _name, classmethod(_factory(_name)))
