"""Converts keyword arguments (`lr=1e-6`), dotted keys and a YAML file to config settings.

A name is a dotted key or its last part. If several keys end with the name, a key of `trainer` has the first
priority. Keys of the critic, the reference, the reward model and validation have the last priority.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import TypeAlias, Union

from hone import program_dialect
from hone.config import ComposedConfig, ConfigError
from hone.config.apply import ExtraChecks, StartingValues, compose_settings
from hone.config.foreign_names import foreign_hint
from hone.config.keys import hints, leaves
from hone.config.short_keys import expand_short_keys, short_keys_of
from hone.config.sources import Setting, flatten, read_config, read_file
from hone.config.trees import TREES
from hone.suggestions import suggestion
from hone.text import working_folder_hint
from hone.types import JsonValue

PlainValue: TypeAlias = Union[str, int, float, bool, "os.PathLike[str]", None]
Value: TypeAlias = Union[PlainValue, Sequence["Value"], Mapping[str, "Value"]]  # noqa: UP007
"""A value that a setting may have."""
PathOrName: TypeAlias = Union[str, "os.PathLike[str]"]
"""A path, or the name of a model on the hub."""
Values: TypeAlias = dict[str, Value]

_SECONDARY_PREFIXES = (
    "critic.",
    "reward_model.",
    "actor_rollout_ref.ref.",
    "actor_rollout_ref.rollout.val_",
)


def given(**settings: Value) -> Values:
    """Returns the settings that are not None."""
    return {name: value for name, value in settings.items() if value is not None}


def matching_keys(schema: str, name: str) -> list[str]:
    """Returns the dotted keys that a name may stand for."""
    root = TREES[schema].root
    keys = _keys(root)
    short_key = short_keys_of(root).get(name, f"trainer.{name}")
    if short_key in keys:
        return [short_key]
    if name.partition(".")[0] in hints(root):
        return [name]
    candidates = [key for key in sorted(keys) if key.endswith(f".{name}")]
    return [key for key in candidates if not key.startswith(_SECONDARY_PREFIXES)] or candidates


def resolve_key(schema: str, name: str) -> str:
    """Returns the dotted key that a name stands for; raises ConfigError unless there is exactly one."""
    root = TREES[schema].root
    hint = foreign_hint(root, name) if "." not in name else ""
    keys = [] if hint else matching_keys(schema, name)
    if len(keys) > 1:
        example = "**{" + repr(keys[0]) + ": …}"
        raise ConfigError(f"{name} may mean {', '.join(keys)}; write the whole key: {example}")
    if not keys:
        last_parts = {key.rpartition(".")[2] for key in _keys(root)}
        hint = hint or suggestion(name, sorted({*short_keys_of(root), *last_parts}))
        raise ConfigError(f"there is no setting {name!r}.{hint} `hone config show` lists the keys")
    return keys[0]


@functools.cache
def _keys(root: type) -> frozenset[str]:
    return frozenset(leaves(root))


def _to_json(value: Value) -> JsonValue:
    """Converts a Python value to the value that a YAML file would have."""
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    if hasattr(value, "tolist"):  # a NumPy scalar, an array or a tensor
        return _to_json(value.tolist())
    if isinstance(value, (Sequence, Set)):
        return [_to_json(item) for item in value]
    return str(value)  # for example a torch.device


def _read_settings(file: Path) -> list[Setting]:
    """Returns the settings of a YAML file, or of a built-in config; the suffix `.yaml` may be left out."""
    if file.suffix in (".yaml", ".yml") and not file.is_file():
        raise ConfigError(f"config={str(file)!r} does not exist{working_folder_hint(file)}")
    if file.suffix != ".yml":
        return read_config(file.name.removesuffix(".yaml"), [file.parent], [], program_dialect())[1]
    if re.search(r"^defaults\s*:", file.read_text("utf-8"), re.MULTILINE):
        raise ConfigError(
            f"{file} has a defaults list, which Hydra reads from .yaml files; rename it"
        )
    return read_file(file)


class CallSettings:
    """The settings of one API call: a YAML file, overridden by keyword arguments."""

    def __init__(
        self, schema: str, caller: str, keywords: Values, config: PathOrName | None = None
    ) -> None:
        self.schema, self.caller, self._config = schema, caller, config
        self._settings: list[Setting] = []
        if config is not None:
            self._settings = _read_settings(Path(config).expanduser())
        self.set(keywords)

    def set(self, values: Values) -> None:
        """Adds settings; each overrides the earlier ones of the same key."""
        for name, value in values.items():
            is_block = isinstance(value, Mapping) and name in hints(TREES[self.schema].root)
            key = name if is_block else resolve_key(self.schema, name)
            self._settings += flatten(_to_json(value), key, self.caller)

    def values(self) -> Values:
        """Returns the values by dotted key, with deprecated keys renamed."""
        settings = expand_short_keys(TREES[self.schema].root, self._settings)
        return {s.key: s.value for s in program_dialect().translate(settings, [], self.schema)}

    def compose(
        self,
        starting_settings: StartingValues | None = None,
        extra_checks: ExtraChecks | None = None,
    ) -> ComposedConfig:
        """Returns the checked config.

        `starting_settings` maps the values of the call to settings of other keys. These settings have the
        lowest priority, and are used only if the call has no YAML file.
        """
        return compose_settings(
            TREES[self.schema],
            self._settings,
            extra_checks,
            dialect=program_dialect(),
            starting_values=starting_settings if self._config is None else None,
        )
