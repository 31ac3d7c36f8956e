"""Configuration: the typed schema, where every default lives, and the way from overrides to it.

Importing this loads no torch; Hydra loads when a configuration is composed.
"""

from __future__ import annotations

from hone.config.apply import Composed
from hone.config.compose import compose, config_to_dict, load_config
from hone.config.errors import ConfigError
from hone.config.keys import replace
from hone.config.schema import PPOTrainerConfig

__all__ = [
    "Composed",
    "ConfigError",
    "PPOTrainerConfig",
    "compose",
    "config_to_dict",
    "load_config",
    "replace",
]
