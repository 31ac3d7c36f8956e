"""Reads command-line overrides and YAML files as settings with an origin.

Hydra parses the overrides and orders the files of a defaults list. verl's trees and groups are registered
with Hydra by name.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hone.config.errors import ConfigError
from hone.config.trees import TREES
from hone.suggestions import suggestion
from hone.types import JsonObject, JsonValue

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

    from hone.config.dialect import Dialect

COMMAND_LINE = "command line"
NAME_DOT = "\u2024"
"""Replaces, in a dotted key, a dot that is part of one name, such as the data source `math.v2`."""
MISSING = "???"
"""OmegaConf's marker of a mandatory value; a key with this value keeps the default of the schema."""

_NEW_ARGUMENT = re.compile(r"[~+-]|[^=]+=")
"""Matches an argument that is not the value of the previous argument."""
_THRESHOLDS = re.compile(r"threshold\s*[=:][^\n#'\"]*$", re.MULTILINE)
_BAND = re.compile(r"(?<![\w.])[\d.]+_[\d.]+(?![\w.])")
"""A lower and an upper bound, such as `0.5_5`."""
_ENGINE_CHOICE = re.compile(r"(actor|critic|engine)/(automodel|megatron|torchtitan|veomni)")
"""The file of an engine in verl's groups; the second group of the match is the strategy."""


@dataclass(frozen=True)
class Setting:
    """One dotted key that was set, its value and its origin."""

    key: str
    value: JsonValue
    origin: str
    delete: bool = False
    """Whether the key was written with `~`, Hydra's syntax for deleting a key."""
    added: bool = False
    """Whether the key was written with `+`, Hydra's syntax for adding a key."""


def parse_overrides(overrides: Sequence[str]) -> list[Setting]:
    """Parses `key=value`, `+key=value`, `++key=value` and `~key` arguments."""
    settings: list[Setting] = []
    for text, next_argument in itertools.zip_longest(overrides, overrides[1:], fillvalue=""):
        parsed = parse_override(text, next_argument)
        key, problem = str(parsed.key_or_group), ""
        if parsed.is_sweep_override():
            problem = "several values for one key; write a list as key=[a,b], or add -m to run once per value"
        elif parsed.package is not None:
            problem = f"the package of a key; write {key}=VALUE"
        if problem:
            raise ConfigError(f"{text!r} names {problem} ({COMMAND_LINE})")
        if parsed.is_delete():
            settings.append(Setting(key, None, COMMAND_LINE, delete=True))
        else:
            leaf_settings = flatten(parsed.value(), key, COMMAND_LINE)
            settings += [replace(s, added=text.startswith("+")) for s in leaf_settings]
    return settings


def parse_override(text: str, next_argument: str = "") -> Override:
    """Parses one override with Hydra; a plain value that Hydra rejects (`~/models/x`) is read as a string.
    `next_argument` is used only in the error message."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    text = quote_bands(text)
    key, equals, value = text.partition("=")
    next_argument = next_argument.strip()
    # `key = value` arrives as three arguments, and `key= value` as two.
    is_value_next = equals and next_argument and not _NEW_ARGUMENT.match(next_argument)
    has_spaces = next_argument.startswith("=") or is_value_next
    advice = "write key=value, with quotes around values that hold spaces, commas or brackets"
    if (key and not value and has_spaces) or key != key.strip():
        advice = f"write {key.strip()}=VALUE without spaces around the ="
    else:
        can_quote = key and value and not set(value) & set("[]{}'\"\\")
        for attempt in (text, f"{key}='{value}'") if can_quote else (text,):
            with contextlib.suppress(HydraException):
                parsed = parser.parse_override(attempt)
                if parsed.key_or_group:
                    return parsed
        advice = f"write {key}=VALUE" if "." in key and not equals else advice
    raise ConfigError(f"cannot read the argument {text!r}; {advice}")


def quote_bands(text: str) -> str:
    """Quotes thresholds such as `0.5_5`, which Hydra and YAML would read as the number 0.55."""
    return _THRESHOLDS.sub(lambda match: _BAND.sub(r"'\g<0>'", match[0]), text)


def flatten(value: JsonValue, key: str, origin: str) -> Iterator[Setting]:
    """Yields one setting per leaf of a nested value; an empty mapping is a leaf."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            inner_key = f"{key}.{str(name).replace('.', NAME_DOT)}" if key else str(name)
            yield from flatten(item, inner_key, origin)
    elif key and value != MISSING:
        yield Setting(key, value, origin)


def read_file(path: Path, package: str = "") -> list[Setting]:
    """Returns the settings of one YAML file, without its defaults list."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        text = quote_bands(path.read_text("utf-8"))
        loaded = OmegaConf.load(io.StringIO(text))
    except (YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    tree = OmegaConf.to_container(loaded, resolve=False)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a list; a config file is a mapping of keys")
    keys: JsonObject = {str(k): value for k, value in tree.items() if k != "defaults"}
    return list(flatten(keys, package, path.name))


def read_config(
    name: str, folders: Sequence[str | Path], overrides: Sequence[str], dialect: Dialect
) -> tuple[str | None, list[Setting]]:
    """Returns the tree that a config names, if any, and its settings, lowest precedence first.

    The config is a file in one of the folders, or built in. Group choices (`engine=fsdp`) in the command-line
    `overrides` select files; the other overrides apply after them.
    """
    paths = (Path(str(folder).removeprefix("file://")) for folder in folders)
    search_folders = [path.expanduser().resolve() for path in paths]
    folders_with_config = (f for f in search_folders if (f / f"{name}.yaml").is_file())
    folder = next(folders_with_config, None)
    if folder is None:
        _require_built_in(name, folders, search_folders, dialect)
    choices = [text for text in overrides if _is_choice(text, search_folders, dialect)]
    paths_and_packages = [(name, "")]
    if folder is not None or choices:
        paths_and_packages = _defaults_list(name, folder, search_folders, choices, dialect)
    settings: list[Setting] = []
    tree: str | None = None
    for path, package in paths_and_packages:
        candidates = (search_folder / f"{path}.yaml" for search_folder in search_folders)
        file = next(filter(Path.is_file, candidates), None)
        if file is not None:
            settings += read_file(file, package)
            continue
        tree = built_in_tree(path, dialect) or tree
        if path in dialect.configs:
            built_in_values = dialect.configs[path][1]
            settings += [Setting(key, value, path) for key, value in built_in_values.items()]
        elif engine := _ENGINE_CHOICE.match(path):
            settings.append(Setting(f"{package}.strategy", engine[2], path))
    key_overrides = [text for text in overrides if text not in choices]
    return tree, [*settings, *parse_overrides(key_overrides)]


def built_in_tree(name: str, dialect: Dialect) -> str | None:
    """Returns the tree of a built-in config, or None."""
    return name if name in TREES else dialect.configs.get(name, (None,))[0]


def _require_built_in(
    name: str, folders: Sequence[str | Path], search_folders: Sequence[Path], dialect: Dialect
) -> None:
    """Raises ConfigError if no config is built in under this name, or if a .yml file has this name.

    If the name is built in, a relative folder or `trainer/config` may be missing, because verl's commands
    name the folder of verl's own configs.
    """
    built_in_names = [*TREES, *dialect.configs]
    for search_folder in search_folders:
        if (file := search_folder / f"{name}.yml").is_file():
            raise ConfigError(f"{file} is not read, because Hydra reads .yaml files; rename it")
    for folder, search_folder in zip(folders, search_folders, strict=True):
        is_verl_folder = search_folder.parts[-2:] == ("trainer", "config")
        is_optional = is_verl_folder or not Path(folder).is_absolute()
        may_be_missing = name in built_in_names and is_optional
        if not search_folder.is_dir() and not may_be_missing:
            hint = suggestion(name, built_in_names)
            raise ConfigError(f"there is no config '{name}': {folder} is no folder here.{hint}")
    if name in built_in_names:
        return
    files = (file for search_folder in search_folders for file in search_folder.glob("*.yaml"))
    hint = suggestion(name, [*(file.stem for file in files), *built_in_names])
    if not search_folders:
        hint += " A config of your own needs --config-path, the folder that holds it"
    where = f" in {', '.join(map(str, search_folders))}" if search_folders else ""
    raise ConfigError(f"there is no config '{name}'{where}.{hint}")


def _is_choice(text: str, search_folders: Sequence[Path], dialect: Dialect) -> bool:
    """Returns whether an override selects a file of a Hydra group instead of setting a key."""
    key, equals, value = text.partition("=")
    group, at, _ = key.lstrip("+~").partition("@")
    if (at or "/" in group) and re.fullmatch(r"\w[\w/]*", group):
        return bool(equals) or text.startswith("~")
    if text.startswith("~") and not equals:
        return any(group and (folder / group).is_dir() for folder in search_folders)
    return value in dialect.groups.get(group, ()) or any(
        (search_folder / group / f"{value}.yaml").is_file() for search_folder in search_folders
    )


def _defaults_list(
    name: str,
    folder: Path | None,
    search_folders: Sequence[Path],
    choices: Sequence[str],
    dialect: Dialect,
) -> list[tuple[str, str]]:
    """Returns (path without suffix, package) of each file in Hydra's merge order."""
    # The user's program may run under `hydra.main`, which owns the global Hydra; this loader does not use it.
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from yaml import YAMLError

    _register_with_hydra(dialect)
    primary = folder or Path(__file__).parent  # any folder without YAML files
    search_urls = ",".join(f"'file://{other}'" for other in search_folders if other != folder)
    options = [f"hydra.searchpath=[{search_urls}]"] if search_urls else []
    options += [text for text in choices if not text.lstrip("+~").startswith("hydra/")]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the search path of another package may not exist
            loader = ConfigLoaderImpl(create_config_search_path(f"file://{primary}"))
            result = loader.compute_defaults_list(name, options, run_mode=RunMode.RUN)
    except RecursionError:
        raise ConfigError(f"the defaults list of {name}.yaml leads back to {name}.yaml") from None
    except (YAMLError, HydraException, ValueError) as error:
        # Hydra raises ValueError for an option that is not a name.
        problem = f"the defaults list of {name}.yaml does not resolve"
        if isinstance(error, YAMLError):
            problem = f"{name}.yaml is not valid YAML"
        raise ConfigError(f"{problem}: {' '.join(str(error).split())}") from None
    for group in (str(override.key_or_group) for override in result.config_overrides):
        if group != "hydra.searchpath":
            advice = f"to set a key, write {group.replace('/', '.')}=VALUE"
            raise ConfigError(f"there is no config group '{group}'; {advice} ({COMMAND_LINE})")
    return [
        (default.config_path, default.package or "")
        for default in result.defaults
        if default.config_path and not default.config_path.startswith("hydra/")
    ]


def _register_with_hydra(dialect: Dialect) -> None:
    """Registers the trees and groups with Hydra, for defaults lists and group choices."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    trees = {name: name for name in TREES} | {n: tree for n, (tree, _) in dialect.configs.items()}
    lists = {name: dialect.defaults_lists.get(tree, {}) for name, tree in trees.items()}
    lists |= {name: {} for name in dialect.files_without_tree}
    for name, options in lists.items():
        entries = [*({group: option} for group, option in options.items()), "_self_"]
        store.store(name=name, node={"defaults": entries}, provider="hone")
    for group, choices in dialect.groups.items():
        for option in choices:
            store.store(name=option, group=group, node={}, provider="hone")
