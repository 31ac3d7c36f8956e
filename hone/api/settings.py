"""Converts keyword arguments (`lr=1e-6`), dotted keys and a YAML file to config settings.

A name is a dotted key or its last part. If several keys end with it, the key of `trainer` has priority, then
the policy's over those of the critic, the reference, the reward model and validation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, Union

from hone.config import Composed, ConfigError
from hone.config.apply import ExtraChecks, compose_settings
from hone.config.errors import did_you_mean, nearest
from hone.config.keys import hints, leaves
from hone.config.sources import Setting, flatten, read_config
from hone.config.states import translate
from hone.config.trees import TREES
from hone.types import JsonValue

Plain: TypeAlias = Union[str, int, float, bool, "os.PathLike[str]", None]
Value: TypeAlias = Union[Plain, Sequence["Value"], Mapping[str, "Value"]]  # noqa: UP007
"""The types that a setting may have."""
Name: TypeAlias = Union[str, "os.PathLike[str]"]
Values: TypeAlias = dict[str, Value]

SHORT_NAMES = {
    "batch_size": ("data.train_batch_size",),
    "epochs": ("trainer.total_epochs",),
    "folder": ("trainer.default_local_dir",),
    "max_tokens": ("data.max_response_length", "rollout.response_length"),
    "n": ("actor_rollout_ref.rollout.n", "data.n_samples"),
    "steps": ("trainer.total_training_steps",),
}
"""Short names with their keys, of which the first that the config has is used."""
_SECONDARY = (
    "critic.",
    "reward_model.",
    "actor_rollout_ref.ref.",
    "actor_rollout_ref.rollout.val_",
)


def matches(tree: str, name: str) -> list[str]:
    """Return the dotted keys that a name may stand for."""
    root = TREES[tree].root
    keys = _keys(root)
    short = [key for key in (*SHORT_NAMES.get(name, ()), f"trainer.{name}") if key in keys]
    if short or name.partition(".")[0] in hints(root):
        return short[:1] or [name]
    candidates = [key for key in sorted(keys) if key.endswith(f".{name}")]
    return [key for key in candidates if not key.startswith(_SECONDARY)] or candidates


def resolve_key(tree: str, name: str) -> str:
    """Return the dotted key that a name stands for, or raise ConfigError."""
    keys = matches(tree, name)
    if len(keys) > 1:
        example = "**{" + repr(keys[0]) + ": …}"
        raise ConfigError(f"{name} may mean {', '.join(keys)}; write the whole key: {example}")
    if not keys:
        endings = {key.rpartition(".")[2] for key in _keys(TREES[tree].root)}
        hint = did_you_mean(nearest(name, sorted({*SHORT_NAMES, *endings})))
        raise ConfigError(f"there is no setting {name!r}.{hint} `hone config show` lists the keys")
    return keys[0]


@functools.cache
def _keys(root: type) -> frozenset[str]:
    return frozenset(leaves(root))


def _to_json(value: Value) -> JsonValue:
    if isinstance(value, Mapping):
        return {key: _to_json(inner) for key, inner in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [_to_json(inner) for inner in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return value.item() if hasattr(value, "item") else str(value)  # a NumPy scalar


class CallSettings:
    """The settings of one API call: a YAML file, overridden by keyword arguments."""

    def __init__(
        self, tree: str, caller: str, settings: Values, config: Name | None = None
    ) -> None:
        self.tree, self.caller, self._config = tree, caller, config
        self._settings: list[Setting] = []
        if config is not None:
            file = Path(config).expanduser()
            self._settings = read_config(file.stem, [file.parent], [])[1]
        self.set(settings)

    def set(self, values: Values) -> None:
        for name, value in values.items():
            self._settings += flatten(_to_json(value), resolve_key(self.tree, name), self.caller)

    def values(self) -> Values:
        """Return the values by dotted key, with deprecated keys renamed."""
        return {s.key: s.value for s in translate(self._settings, [], self.tree)}

    def compose(
        self,
        starting_values: Callable[[Values], list[Setting]] = lambda values: [],
        extra_checks: ExtraChecks | None = None,
    ) -> Composed:
        """Return the checked config; with a YAML file, there are no starting values."""
        defaults = starting_values(self.values()) if self._config is None else []
        return compose_settings(TREES[self.tree], [*defaults, *self._settings], extra_checks)
