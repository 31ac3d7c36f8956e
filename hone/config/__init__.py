"""Configuration: the typed schema, where every default lives, and the way from overrides to it.

The order of precedence is schema, files in the order of their defaults list, command line. Importing this
loads no torch; Hydra loads when a configuration is composed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, overload

from hone.config.apply import Composed, Further, compose_settings
from hone.config.convert import Value, to_plain
from hone.config.errors import ConfigError
from hone.config.evaluation import EvaluationConfig
from hone.config.generation import GenerationConfig
from hone.config.keys import replace
from hone.config.schema import PPOTrainerConfig
from hone.config.sft import SFTConfig
from hone.config.sources import Setting, read_config
from hone.config.trees import TREES
from hone.types import JsonObject, Row

__all__ = [
    "Composed",
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
    starting: Callable[[JsonObject], list[Setting]] | None = None,
    further: Further | None = None,
) -> Composed:
    """Resolve a configuration and remember where each value came from.

    `config_path` and `config_dir` are folders of the user's own YAML files. `starting` gives values for
    keys that were not set, from those that were, by dotted key. `further` are checks of what the tree
    asks for beyond its values: which columns an algorithm reads.
    """
    name = config_name.removesuffix(".yaml").removesuffix(".yml")
    folders = [folder for folder in (config_path, config_dir) if folder]
    named, settings = read_config(name, folders, overrides)
    tree = TREES[schema or named or "ppo_trainer"]
    if starting is not None:
        values = {s.key: s.value for s in tree.translate(settings, [])}
        settings = [*starting(values), *settings]
    return compose_settings(tree, settings, further)


@overload
def load_config(  # type: ignore[overload-overlap]
    overrides: Sequence[str] = (), *, config_name: Literal["sft_trainer"]
) -> SFTConfig: ...
@overload
def load_config(  # type: ignore[overload-overlap]
    overrides: Sequence[str] = (), *, config_name: Literal["generation"]
) -> GenerationConfig: ...
@overload
def load_config(  # type: ignore[overload-overlap]
    overrides: Sequence[str] = (), *, config_name: Literal["evaluation"]
) -> EvaluationConfig: ...
@overload
def load_config(
    overrides: Sequence[str] = (), *, config_name: str = ..., config_path: str | Path | None = None
) -> PPOTrainerConfig: ...
def load_config(
    overrides: Sequence[str] = (),
    *,
    config_name: str = "ppo_trainer",
    config_path: str | Path | None = None,
) -> Value:
    """The frozen config tree for a list of Hydra overrides and, optionally, a user's YAML."""
    return compose(overrides, config_name=config_name, config_path=config_path).config


def config_to_dict(config: Value) -> Row:
    """Plain nested dict of a config tree or block, ready for YAML or JSON."""
    plain: Row = to_plain(config)
    return plain
