"""Hydra's command line for our programs: `--config-path`, `--config-name`, then `key=value` overrides."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hone.config import load_config


def config_of(arguments: Sequence[str], *, config_name: str, program: str) -> Any:
    """The configuration a command line asks for."""
    parser = argparse.ArgumentParser(
        prog=program, description="Overrides are key=value; `hone config show` lists the keys."
    )
    parser.add_argument("--config-path", "-cp", help="folder of your own YAML files")
    parser.add_argument(
        "--config-name", "-cn", default=config_name, help="which YAML to start from"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    chosen = parser.parse_intermixed_args(list(arguments))
    return load_config(
        chosen.overrides, config_name=chosen.config_name, config_path=chosen.config_path
    )
