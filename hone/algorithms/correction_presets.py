"""Named settings of `algorithm.rollout_correction`, as verl names them.

A preset is a dict of keys to lay over the configuration; "decoupled" recomputes old log-probs,
"bypass" takes the rollout's. Unnamed keys keep their configured value.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from hone.algorithms.keywords import refuse_unknown
from hone.config.algorithm import RolloutCorrectionConfig

Settings = dict[str, Any]

_RATIO = "0.5_2.0"
_GEO_BAND = "0.999_1.001"
_K3_BOUND = 0.01
_CUT = 2.0


def _weights(level: str, threshold: Any) -> Settings:
    return {"rollout_is": level, "rollout_is_threshold": threshold}


def _reject(option: str, threshold: Any) -> Settings:
    return {"rollout_rs": option, "rollout_rs_threshold": threshold}


def _bypass(loss_type: str) -> Settings:
    return {"bypass_mode": True, "loss_type": loss_type}


_OFF: Settings = {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}
_GEO = _reject("seq_mean_k1", _GEO_BAND)
_K3 = _reject("seq_mean_k3", _K3_BOUND)
_SEQUENCE, _TOKEN = _weights("sequence", _CUT), _weights("token", _CUT)

PRESETS: dict[str, Settings] = {
    "disabled": _OFF,
    "decoupled_token_is": _OFF | _TOKEN,
    "decoupled_seq_is": _OFF | _SEQUENCE,
    "decoupled_seq_is_rs": _OFF | _SEQUENCE | _reject("seq_sum_k1", _RATIO),
    "decoupled_geo_rs": _OFF | _GEO,
    "decoupled_geo_rs_seq_tis": _OFF | _GEO | _SEQUENCE,
    "decoupled_geo_rs_token_tis": _OFF | _GEO | _TOKEN,
    "decoupled_k3_rs": _OFF | _K3,
    "decoupled_k3_rs_seq_tis": _OFF | _K3 | _SEQUENCE,
    "decoupled_k3_rs_token_tis": _OFF | _K3 | _TOKEN,
    "bypass_ppo_clip": _OFF | _bypass("ppo_clip"),
    "bypass_ppo_clip_geo_rs": _OFF | _bypass("ppo_clip") | _GEO,
    "bypass_ppo_clip_k3_rs": _OFF | _bypass("ppo_clip") | _K3,
    "bypass_pg_is": _OFF | _bypass("reinforce") | _SEQUENCE,
    "bypass_pg_geo_rs": _OFF | _bypass("reinforce") | _GEO,
    "bypass_pg_geo_rs_seq_tis": _OFF | _bypass("reinforce") | _GEO | _SEQUENCE,
    "bypass_pg_geo_rs_token_tis": _OFF | _bypass("reinforce") | _GEO | _TOKEN,
}


def preset(name: str, **changes: Any) -> Settings:
    """The settings of a preset, with changes (`rollout_is_threshold=3.0`) laid over it."""
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"unknown rollout-correction preset {name!r}.{hint} Known: {', '.join(PRESETS)}"
        )
    known = [field.name for field in dataclasses.fields(RolloutCorrectionConfig)]
    refuse_unknown(f"preset {name}", set(changes) - set(known), known)
    return PRESETS[name] | changes
