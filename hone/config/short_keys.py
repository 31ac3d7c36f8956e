"""The short names of the main settings (`lr`, `n`, `steps`, …) on the command line, in YAML and in Python.

A short name stands for a value only; `model.path=…` or a mapping at `model` is the block `model` of a tree.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hone.config.keys import blocks, leaves
from hone.config.sources import Setting


class ShortKey(NamedTuple):
    """The keys that a short name stands for, an example of a value, and a description."""

    keys: tuple[str, ...]
    """The first key that a tree has is used."""
    example: str
    doc: str


_REWARD_KEYS = ("custom_reward_function.path", "custom_reward_function.name")
SHORT_KEYS: Mapping[str, ShortKey] = {
    "model": ShortKey(
        ("actor_rollout_ref.model.path", "model.path"), "MODEL", "model folder or hub name"
    ),
    "data": ShortKey(("data.train_files", "data.path"), "rows.jsonl", "files of rows"),
    "reward": ShortKey(_REWARD_KEYS[:1], "reward.py:score", "reward function, FILE.py:NAME"),
    "val": ShortKey(("data.val_files",), "val.jsonl", "files to validate on"),
    "lr": ShortKey(("actor_rollout_ref.actor.optim.lr", "optim.lr"), "1e-6", "learning rate"),
    "steps": ShortKey(("trainer.total_training_steps",), "100", "training steps"),
    "epochs": ShortKey(("trainer.total_epochs",), "1", "passes over the data"),
    "n": ShortKey(("actor_rollout_ref.rollout.n", "data.n_samples"), "8", "responses per prompt"),
    "batch_size": ShortKey(("data.train_batch_size",), "64", "rows per step"),
    "max_tokens": ShortKey(
        ("data.max_response_length", "rollout.response_length"), "512", "tokens of a response"
    ),
    "estimator": ShortKey(("algorithm.adv_estimator",), "grpo", "advantage estimator"),
    "out": ShortKey(
        ("trainer.default_local_dir", "data.output_path", "output.json_path"),
        "runs/mine",
        "where to write",
    ),
}
_FUNCTION_IN_FILE = re.compile(r"(?P<path>.+):(?P<name>[A-Za-z_]\w*)")


def short_keys_of(root: type) -> dict[str, str]:
    """Returns the key of each short name that a tree has."""
    known_keys = leaves(root)
    found = {
        name: next((key for key in short.keys if key in known_keys), "")
        for name, short in SHORT_KEYS.items()
    }
    return {name: key for name, key in found.items() if key}


def expand_short_keys(root: type, settings: Sequence[Setting]) -> list[Setting]:
    """Returns the settings with each short name replaced by its key."""
    keys = short_keys_of(root)
    expanded: list[Setting] = []
    for setting in settings:
        is_empty_block = setting.key in blocks(root) and setting.value in (None, {})
        is_reference = setting.key in blocks(root) and "${" in str(setting.value)
        if setting.key not in keys or setting.delete or is_empty_block or is_reference:
            expanded.append(setting)
            continue
        key, value = keys[setting.key], setting.value
        origin = f"{setting.origin}, written {setting.key}"
        setting = dataclasses.replace(setting, key=key, origin=origin, added=False)
        if key == _REWARD_KEYS[0] and (match := _FUNCTION_IN_FILE.fullmatch(str(value))):
            expanded.append(dataclasses.replace(setting, value=match["path"]))
            expanded.append(dataclasses.replace(setting, key=_REWARD_KEYS[1], value=match["name"]))
        else:
            expanded.append(setting)
    return expanded


def help_text(root: type, program: str) -> str:
    """Returns an example and the short names with their descriptions, for `--help`."""
    keys = short_keys_of(root)
    shown = [
        name for name in ("model", "data", "reward", "lr", "steps", "n", "out") if name in keys
    ]
    example = " ".join(f"{name}={SHORT_KEYS[name].example}" for name in shown)
    width = max(map(len, keys), default=0)
    lines = [f"  {name:<{width}}  {SHORT_KEYS[name].doc} ({key})" for name, key in keys.items()]
    return "\n".join(["example:", f"  {program} {example}", "", "keys, as key=value:", *lines])
