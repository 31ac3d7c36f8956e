"""Keyword arguments as settings of a config tree: `lr=1e-6`, dotted keys, a YAML file.

A name is a dotted key, or an ending that only one key has. Of several keys with that ending the name means
`trainer`'s, else the policy's (not the critic's, the reference's, the reward model's or validation's).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, Union

from hone.config import Composed, ConfigError
from hone.config.apply import Further, compose_settings
from hone.config.errors import did_you_mean, nearest
from hone.config.keys import hints, leaves
from hone.config.sources import Setting, flatten, read_config
from hone.config.trees import TREES
from hone.types import JsonValue

Plain: TypeAlias = Union[str, int, float, bool, "os.PathLike[str]", None]
Value: TypeAlias = Union[Plain, Sequence["Value"], Mapping[str, "Value"]]  # noqa: UP007
"""What a setting may be given as."""
Name: TypeAlias = Union[str, "os.PathLike[str]"]
Values: TypeAlias = dict[str, Value]

SHORT = {
    "batch_size": ("data.train_batch_size",),
    "epochs": ("trainer.total_epochs",),
    "folder": ("trainer.default_local_dir",),
    "max_tokens": ("data.max_response_length", "rollout.response_length"),
    "n": ("actor_rollout_ref.rollout.n", "data.n_samples"),
    "steps": ("trainer.total_training_steps",),
}
"""Short names that are no ending of their key, or an ending of several; the first key that a tree has."""
_OTHERS = ("critic.", "reward_model.", "actor_rollout_ref.ref.", "actor_rollout_ref.rollout.val_")


def matches(tree: str, name: str) -> list[str]:
    """The dotted keys that a name may stand for."""
    root = TREES[tree].root
    keys = _keys(root)
    short = [key for key in (*SHORT.get(name, ()), f"trainer.{name}") if key in keys]
    if short or name.partition(".")[0] in hints(root):
        return short[:1] or [name]
    every = [key for key in sorted(keys) if key.endswith(f".{name}")]
    return [key for key in every if not key.startswith(_OTHERS)] or every


def key_of(tree: str, name: str) -> str:
    """The one dotted key that a name stands for."""
    keys = matches(tree, name)
    if len(keys) > 1:
        whole = "**{" + repr(keys[0]) + ": …}"
        raise ConfigError(f"{name} may mean {', '.join(keys)}; write the whole key: {whole}")
    if not keys:
        endings = {key.rpartition(".")[2] for key in _keys(TREES[tree].root)}
        hint = did_you_mean(nearest(name, sorted({*SHORT, *endings})))
        raise ConfigError(f"there is no setting {name!r}.{hint} `hone config show` lists the keys")
    return keys[0]


@functools.cache
def _keys(root: type) -> frozenset[str]:
    return frozenset(leaves(root))


def _plain(value: Value) -> JsonValue:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return value.item() if hasattr(value, "item") else str(value)  # a number of numpy's


class CallSettings:
    """The settings of a call in one tree: a YAML file, then its keyword arguments."""

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
            self._settings += flatten(_plain(value), key_of(self.tree, name), self.caller)

    def values(self) -> Values:
        """The values by today's dotted keys."""
        return {s.key: s.value for s in TREES[self.tree].translate(self._settings, [])}

    def composed(
        self,
        starting: Callable[[Values], list[Setting]] = lambda values: [],
        further: Further | None = None,
    ) -> Composed:
        """The checked tree; a YAML file is taken as it is, without starting values."""
        before = starting(self.values()) if self._config is None else []
        return compose_settings(TREES[self.tree], [*before, *self._settings], further)
