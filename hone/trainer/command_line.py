"""Parses the command line of a program: `--config-path`, `--config-name` and `key=value` overrides.

A user error prints one sentence and exits with code 2; its traceback is in the run folder. Any other error
prints its traceback.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from traceback import format_exception

from hone import program_dialect
from hone.config import ComposedConfig, compose
from hone.config.apply import ExtraChecks
from hone.config.block import Block
from hone.config.errors import ConfigError
from hone.config.foreign_names import foreign_hint
from hone.config.generation import GenerationConfig
from hone.config.keys import get, leaves, suggested_keys
from hone.config.short_keys import help_text, short_keys_of
from hone.config.sources import Setting
from hone.config.trees import TREES
from hone.data.files import is_non_local
from hone.errors import UserError
from hone.suggestions import did_you_mean, nearest
from hone.tracking import RunFolder
from hone.tracking.atomic import storage_error_message
from hone.tracking.lock import FolderLock, lock_folder
from hone.trainer.config_notes import print_config_notes
from hone.trainer.interrupt import (
    SIGNAL_NAMES,
    Interrupted,
    Terminated,
    exit_on_signal,
    set_stop_message,
    signal_exit_code,
    stop_message,
)
from hone.trainer.ranks import Ranks, die_with_launcher, launch, must_launch
from hone.types import Settings

USER_ERROR_EXIT_CODE = 2
ERROR_LOG = "error.log"
DRY_RUN = "--dry-run"
_last_composed: ComposedConfig | None = None
"""The last configuration of this process, used to name the key that caused an error."""


def compose_arguments(
    arguments: Sequence[str],
    *,
    schema: str,
    program: str,
    starting_values: Callable[[Settings], list[Setting]] | None = None,
    extra_checks: ExtraChecks | None = None,
) -> ComposedConfig:
    """Composes the configuration of a command line, with the origin of each value.

    `schema` names the tree of keys, also for a user's YAML without a defaults list. `starting_values` returns
    values for keys that are not set; it is called unless --config-name selects another YAML.
    """
    options = _parse(arguments, schema, program)
    composed = compose(
        options.overrides,
        config_name=options.config_name or schema,
        config_path=options.config_path,
        config_dir=options.config_dir,
        schema=schema,
        starting_values=starting_values if options.config_name in (None, "", schema) else None,
        extra_checks=extra_checks,
        dialect=program_dialect(),
    )
    if options.cfg or options.info:
        from hone.config.document import as_yaml, format_with_origins

        package = "" if options.package in (None, "_global_") else options.package
        if options.cfg:
            sys.stdout.write(as_yaml(composed, package))
        else:
            sys.stdout.write(format_with_origins(composed, only_set=True))
        raise SystemExit(0)
    global _last_composed
    _last_composed = composed
    set_stop_message(lambda: _saved_state_sentence(composed.config))
    return composed


def _parse(arguments: Sequence[str], schema: str, program: str) -> argparse.Namespace:
    """Parses the command line."""
    parser = build_parser(schema, program)
    arguments = ["--info" if word.startswith("--info=") else word for word in arguments]
    long_options = [name for name in parser._option_string_actions if name.startswith("--")]
    for argument in arguments:
        option, _, value = argument.partition("=")
        if option.startswith("--") and option not in long_options:
            if similar_option := nearest(option, long_options, 0.8):
                raise ConfigError(f"there is no option {option}.{did_you_mean(similar_option)}")
            raise ConfigError(_unknown_option_message(option, value or "VALUE", schema))
    return parser.parse_intermixed_args(arguments)


def build_parser(schema: str, program: str) -> argparse.ArgumentParser:
    """Returns the parser of a program; options of Hydra have Hydra's names."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} key=value ... [options]",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=help_text(TREES[schema].root, program),
        epilog=f"`hone config show --tree {schema}` lists all keys.",
    )
    parser.add_argument("--config-path", "-cp", help="folder of your own YAML files")
    parser.add_argument("--config-dir", "-cd", help="another folder of your own YAML files")
    parser.add_argument("--config-name", "-cn", help=f"the YAML to start from (default: {schema})")
    parser.add_argument("--multirun", "-m", action="store_true", help="run key=a,b once per value")
    parser.add_argument("--run", "-r", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cfg", "-c", choices=("job", "hydra", "all"), help="print the config")
    parser.add_argument("--resolve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--package", "-p", metavar="KEY", help="the block that --cfg prints")
    parser.add_argument(
        "--info", "-i", action="store_true", help="print the keys that are set, and where"
    )
    # For --help only: the programs remove these two options before they call `compose_arguments`.
    if program in ("hone train", "main_ppo"):
        parser.add_argument(
            DRY_RUN, action="store_true", help="check the run, print what it would do, and stop"
        )
    if program == "hone generate":
        parser.add_argument("--search", metavar="URL", help="let the model search this service")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=argparse.SUPPRESS)
    return parser


def _unknown_option_message(option: str, value: str, schema: str) -> str:
    """Returns the error message for an unknown option, with the keys that the user may have meant."""
    name, root = option.lstrip("-").replace("-", "_"), TREES[schema].root
    keys = list(leaves(root))
    known_names = (*keys, *short_keys_of(root))
    suggestions = [name] if name in known_names else suggested_keys(root, name)
    if hint := foreign_hint(root, name):
        return f"there is no option {option}; settings are key=value.{hint}"
    if not suggestions and not any(key.endswith(f".{name}") for key in keys):
        nearest_key = nearest(name, keys)
        suggestions = [nearest_key] if nearest_key else []
    examples = " or ".join(f"{key}={value}" for key in suggestions)
    advice = f", as in {examples}" if suggestions else ""
    return (
        f"there is no option {option}; settings are key=value{advice} "
        f"(`hone config show --tree {schema}` lists them)"
    )


def _saved_state_sentence(config: Block) -> str:
    """Returns a sentence that says what is saved so far, and whether the same command resumes from it."""
    if isinstance(config, GenerationConfig):
        return "finished responses are kept, and the same command generates the others"
    trainer = config.get("trainer")
    if not hasattr(trainer, "default_local_dir"):
        return "nothing was written"
    checkpoints = RunFolder(trainer.default_local_dir).checkpoints()
    if not checkpoints:
        return "nothing is saved yet, and the same command starts anew"
    command = "the same command" if trainer.resume_mode == "auto" else "trainer.resume_mode=auto"
    return f"{checkpoints[-1][1]} is saved, and {command} goes on from there"


def check_plan(config: Block, origins: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Returns the problems that would stop a run, and notes on keys without effect."""
    from hone.trainer.ppo.plan import find_problems_and_notes

    return find_problems_and_notes(config, origins)


def require_keys(composed: ComposedConfig, keys: Mapping[str, str]) -> None:
    """Raises an error that names the keys that were not given; `keys` maps each key to its description."""
    missing_keys = [key for key in keys if key not in composed.origins]
    if missing_keys:
        raise ConfigError(
            "; ".join(f"{key} was not given: set it to {keys[key]}" for key in missing_keys)
        )


def check_output_folder(path: str, key: str) -> None:
    """Raises an error if results cannot be written to this folder; the folder need not exist."""
    _check_local(path, key)
    folder = Path(path).expanduser().absolute()
    if folder.is_file():
        raise ConfigError(f"{key}={path} is a file; name a folder, new or of an earlier run")
    _check_writable(folder, f"{key}={path}")


def check_output_file(path: str, key: str, inputs: Sequence[str] = ()) -> None:
    """Raises an error if results cannot be written to this file, or if the file is one of `inputs`."""
    _check_local(path, key)
    file = Path(path).expanduser().absolute()
    if file.is_dir():
        raise ConfigError(f"{key}={path} is a folder; name a file in it")
    if file.is_file() and any(file.samefile(name) for name in inputs if Path(name).exists()):
        raise ConfigError(f"{key}={path} would replace a file of data.path; name another file")
    _check_writable(file.parent, f"{key}={path}")


def _check_local(path: str, key: str) -> None:
    """Raises an error if the path is in a remote store."""
    if is_non_local(path):
        hint = "; checkpoints are copied to trainer.default_hdfs_dir" if "dir" in key else ""
        raise ConfigError(f"{key}={path} is in a remote store; name a local path{hint}")


def _check_writable(folder: Path, setting: str) -> None:
    """Raises an error that begins with `setting` if the folder cannot be created or written to."""
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    if not parent.is_dir():
        raise ConfigError(f"{setting}: {parent} is a file, so nothing can be written below it")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{setting}: {parent} cannot be written to; name another place")


def path_override(key: str, path: str | Path) -> str:
    """Returns the override `key='path'`, escaped for Hydra's grammar.

    Quotes are escaped, and backslashes before a quote are doubled; other backslashes stay as they are.
    """

    def escape(match: re.Match[str]) -> str:
        return match[1] * 2 + ("\\'" if match[2] else "")

    text = re.sub(r"(\\*)('|\Z)", escape, str(path))
    return f"{key}='{text}'"


def lock_run_folder(folder: str) -> AbstractContextManager[FolderLock | None]:
    """Returns the lock of a run folder, or an empty context if the folder cannot be written to."""
    try:
        check_output_folder(folder, "trainer.default_local_dir")
    except ConfigError:  # a later check reports the problem
        return nullcontext()
    return lock_folder(folder)


def run_ranks(
    composed: ComposedConfig, arguments: Sequence[str], module: str, run: Callable[[], object]
) -> None:
    """Calls `run` if this process is a rank of the program `module`, or else launches the ranks."""
    trainer = composed.config.trainer
    if Ranks.from_env().is_first:
        print_config_notes(composed)
    if trainer.controller == "ray":
        raise ConfigError(
            f"trainer.controller=ray: the ranks of {module} are plain processes; leave it at auto, "
            "or start them on the cluster's machines with torchrun"
        )
    if must_launch(composed.config.world_size, trainer.nnodes, module):
        launch(composed.config.world_size, module, arguments)
    else:
        run()


def run_module(main: Callable[[Sequence[str]], int | None], schema: str, module: str) -> int:
    """Runs `python -m module …` once, or as a sweep if the arguments contain `-m` (`--multirun`)."""
    from hone.trainer.sweep import run_or_sweep

    return run_program(lambda: run_or_sweep(main, sys.argv[1:], schema, ["-m", module]))


def run_program(program: Callable[[], int | None]) -> int:
    """Runs a program and returns its exit code; prints a user error in one sentence."""
    global _last_composed
    _last_composed = None
    die_with_launcher()
    try:
        with exit_on_signal():
            return program() or 0
    except Interrupted as interrupt:  # at the end of a step, after saving
        signal_number = signal.Signals(int(interrupt.code or 0) - 128)
        if Ranks.from_env().is_first:
            sys.stderr.write(stop_message(f"stopped by {SIGNAL_NAMES[signal_number]}"))
        return signal_exit_code(signal_number)
    except (KeyboardInterrupt, Terminated) as error:  # SIGINT or SIGTERM, without saving
        signal_number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        sys.stderr.write(stop_message(f"stopped at once by {SIGNAL_NAMES[signal_number]}"))
        return signal_exit_code(signal_number)
    except Exception as error:
        message = user_error_message(error)
        if message is None:
            raise
        sys.stderr.write(f"{type(error).__name__}: {message}\n")
        if (log_file := write_traceback(error)) is not None:
            sys.stderr.write(f"the traceback is in {log_file}\n")
        return USER_ERROR_EXIT_CODE


def write_traceback(error: BaseException, folder: Path | None = None) -> Path | None:
    """Appends the traceback of an error to the log of a run folder, and returns the path of the log.

    The default folder is that of the last configuration. Returns None if nothing was written.
    """
    if folder is None:
        config = None if _last_composed is None else _last_composed.config
        trainer = getattr(config, "trainer", None)
        folder = Path(getattr(trainer, "default_local_dir", "") or "").expanduser()
    if folder == Path() or not folder.is_dir() or getattr(error, "skips_error_log", False):
        return None
    lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n", *format_exception(error), "\n"]
    try:
        with (folder / ERROR_LOG).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)
    except OSError:  # the folder may not be writable
        return None
    return folder / ERROR_LOG


def user_error_message(error: BaseException) -> str | None:
    """Returns the message for an error that the user can correct; None for any other error."""
    from hone.launch import LaunchError
    from hone.sandbox import SandboxError

    # The rooms of the last two stand alone, so they do not know UserError.
    if isinstance(error, UserError | LaunchError | SandboxError):
        return _prefix_with_key(str(error), getattr(error, "path", None))
    if (message := storage_error_message(error)) is not None:
        return message
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, FileNotFoundError):
        return str(error)
    if isinstance(error, OSError) and error.errno is None:  # transformers did not find a model
        return str(error).strip().partition("\n")[0]
    return None


def _prefix_with_key(message: str, path: str | None) -> str:
    """Returns `key=path: message` if the value of a key is `path`, or else the message."""
    composed = _last_composed
    if composed is None or not path:
        return message
    root: type = type(composed.config)
    keys = [key for key in leaves(root) if key.endswith("path")]
    for key in sorted(keys, key=lambda key: key not in composed.origins):
        if get(composed.config, key) == path:
            return f"{key}={path}: {message}"
    return message
