"""What the user wrote, as settings with an origin: command-line overrides and YAML files.

Hydra parses the overrides and orders the files of a defaults list; the schema is not known here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.config.errors import ConfigError, did_you_mean, nearest

COMMAND_LINE = "command line"

# Groups of the family's own defaults lists. Their contents are the schema's defaults here.
FAMILY_GROUPS = {
    "actor": ("actor", "dp_actor"),
    "algorithm": ("rollout_correction",),
    "critic": ("critic", "dp_critic"),
    "data": ("legacy_data",),
    "engine": ("fsdp",),
    "model": ("hf_model",),
    "optim": ("fsdp",),
    "profiler": ("profiler",),
    "ref": ("ref", "dp_ref"),
    "reward_manager": ("reward_manager",),
    "reward_model": ("dp_reward_loop", "dp_reward_model", "reward_model"),
    "rollout": ("rollout",),
    "npu_profile": ("npu_profile",),
}
FAMILY_FILES = ("reward_manager", "_generated_ppo_trainer")


@dataclass(frozen=True)
class Setting:
    """One dotted key that someone set."""

    key: str
    value: Any
    origin: str
    delete: bool = False


def parse_overrides(overrides: Sequence[str]) -> list[Setting]:
    """Settings of `key=value`, `+key=value`, `++key=value` and `~key` arguments."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    settings: list[Setting] = []
    for text in overrides:
        try:
            parsed = _parse(parser, text)
        except HydraException as error:
            raise ConfigError(
                f"cannot read the argument {text!r}; write key=value, with quotes around values "
                f"that hold spaces, commas or brackets ({str(error).splitlines()[0]})"
            ) from None
        if not parsed.key_or_group:
            raise ConfigError(f"cannot read the argument {text!r}; write key=value")
        if parsed.is_sweep_override():
            raise ConfigError(
                f"{text!r} names several values for one key; write a list as key=[a,b] ({COMMAND_LINE})"
            )
        value = None if parsed.is_delete() else parsed.value()
        if parsed.is_delete():
            settings.append(Setting(parsed.key_or_group, None, COMMAND_LINE, delete=True))
        else:
            settings.extend(flatten(value, parsed.key_or_group, COMMAND_LINE))
    return settings


def _parse(parser: Any, text: str) -> Any:
    """One override; a plain value that Hydra's grammar stumbles over (`~/models/x`) is a string."""
    from hydra.errors import HydraException

    try:
        return parser.parse_override(text)
    except HydraException:
        key, _, value = text.partition("=")
        if not key or not value or set(value) & set("[]{}'\"\\"):
            raise
        return parser.parse_override(f"{key}='{value}'")


def flatten(value: Any, key: str, origin: str) -> Iterator[Setting]:
    """One setting for every leaf; a mapping with nothing in it is a leaf."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from flatten(inner, f"{key}.{name}" if key else str(name), origin)
    elif key:
        yield Setting(key, value, origin)


def read_file(path: Path, package: str = "") -> list[Setting]:
    """Settings of one YAML file, without its defaults list."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        loaded = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except FileNotFoundError:
        raise ConfigError(f"there is no config file {path}") from None
    tree = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a list; a config file is a mapping of keys")
    tree.pop("defaults", None)
    return list(flatten(tree, package, path.name))


def read_config(
    config_name: str, config_path: str | Path, schemas: Sequence[str]
) -> tuple[str | None, list[Setting]]:
    """Settings of a user's config and the files its defaults list names, in order of precedence.

    The first element is the schema that the defaults list names, if it names one.
    """
    folder = Path(config_path).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(f"--config-path {config_path} is no folder")
    name = config_name.removesuffix(".yaml").removesuffix(".yml")
    if not (folder / f"{name}.yaml").is_file():
        if name in schemas:
            return name, []
        known = [*(p.stem for p in folder.glob("*.yaml")), *schemas]
        raise ConfigError(
            f"there is no config '{name}' in {folder}.{did_you_mean(nearest(name, known))}"
        )
    schema: str | None = None
    settings: list[Setting] = []
    for path, package in _defaults_list(name, folder, schemas):
        file = folder / f"{path}.yaml"
        if file.is_file():
            settings.extend(read_file(file, package))
        if path in schemas:
            schema = path
    return schema, settings


def _defaults_list(name: str, folder: Path, schemas: Sequence[str]) -> list[tuple[str, str]]:
    """(file without suffix, package) in the order in which Hydra would merge them."""
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from yaml import YAMLError

    store = ConfigStore.instance()
    for schema in schemas:
        store.store(name=schema, node={}, provider="hone")
    for group, options in FAMILY_GROUPS.items():
        for option in options:
            store.store(name=option, group=group, node={}, provider="hone")
    for file in FAMILY_FILES:
        store.store(name=file, node={}, provider="hone")
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(folder), version_base=None):
            warnings.simplefilter("ignore")  # a search path of another package's need not exist
            loader = GlobalHydra.instance().config_loader()
            listed = loader.compute_defaults_list(name, [], run_mode=RunMode.RUN)
    except YAMLError as error:
        raise ConfigError(
            f"{name}.yaml is not valid YAML: {' '.join(str(error).split())}"
        ) from None
    except HydraException as error:
        raise ConfigError(f"the defaults list of {name}.yaml does not resolve: {error}") from None
    return [
        (default.config_path, default.package or "")
        for default in listed.defaults
        if default.config_path and not default.config_path.startswith("hydra/")
    ]
