"""Configuration: the typed schema with every default, and loading from overrides and files.

Precedence, lowest first: schema, files in the order of their defaults list, command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hone.config.apply import ComposedConfig, ExtraChecks, StartingValues, compose_settings
from hone.config.convert import Config
from hone.config.convert import to_plain as config_to_dict
from hone.config.dialect import OWN_KEYS, Dialect
from hone.config.errors import ConfigError
from hone.config.keys import replace
from hone.config.sources import built_in_tree, read_config
from hone.config.trees import TREES, PPOTrainerConfig

__all__ = [
    "ComposedConfig",
    "ConfigError",
    "PPOTrainerConfig",
    "compose",
    "config_to_dict",
    "load_config",
    "replace",
]


def compose(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "ppo_trainer",
    config_path: str | Path | None = None,
    config_dir: str | Path | None = None,
    schema: str | None = None,
    starting_values: StartingValues | None = None,
    extra_checks: ExtraChecks | None = None,
    dialect: Dialect = OWN_KEYS,
) -> ComposedConfig:
    """Resolves a configuration and records the origin of each value.

    `config_path` and `config_dir` are folders of the user's YAML files. `schema` is the name of the tree; by
    default, the file names its tree. `starting_values` takes the values that were set, by dotted key, and
    returns settings of lower precedence. `dialect` is the meaning of commands of another framework.
    """
    name = config_name.removesuffix(".yaml").removesuffix(".yml")
    folders = [folder for folder in (config_path, config_dir) if folder]
    tree_name, settings = read_config(name, folders, overrides, dialect)
    if schema and tree_name and tree_name != schema:
        raise ConfigError(
            f"config '{name}' is for {TREES[tree_name].purpose}; this program reads {schema}"
        )
    tree = TREES[schema or tree_name or built_in_tree(name, dialect) or "ppo_trainer"]
    return compose_settings(
        tree, settings, extra_checks, dialect=dialect, starting_values=starting_values
    )


def load_config(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "ppo_trainer",
    config_path: str | Path | None = None,
    dialect: Dialect = OWN_KEYS,
) -> Config:
    """Returns the frozen config tree for a list of Hydra overrides and, optionally, a user's YAML."""
    composed = compose(overrides, config_name=config_name, config_path=config_path, dialect=dialect)
    return composed.config
