"""Runs a program once per combination of the values in `-m key=a,b …`, and prints a table of results.

All combinations are checked before the first run starts. Runs do not overlap; a failed run does not stop the
others.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hone.config.convert import show_value
from hone.config.errors import ConfigError
from hone.config.keys import get
from hone.config.sources import parse_override
from hone.trainer.command_line import compose_arguments, path_override
from hone.trainer.interrupt import signal_exit_code
from hone.trainer.ranks import run_python
from hone.types import JsonValue

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

SWEEP_FLAGS = ("-m", "--multirun")
PROGRAM_FLAGS = {"--dry-run": 0, "--search": 1}
"""Flags that each run gets unchanged, with the number of their arguments."""
_REFUSED_FLAGS = (
    "--model", "--bench", "--data", "--out", "--folds", "--baseline", "--processbench", "--best-of-n",
    "--aggregate", "--split",
)  # fmt: skip
"""Flags of evaluation programs; the runs of a sweep with such a flag would write the same files."""
_RUN_FOLDERS = ("trainer.default_local_dir", "trainer.default_hdfs_dir")
OUTPUT_KEYS = {
    "ppo_trainer": (*_RUN_FOLDERS, "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    "sft_trainer": _RUN_FOLDERS,
    "prm_trainer": _RUN_FOLDERS,
    "rm_trainer": _RUN_FOLDERS,
    "dpo_trainer": _RUN_FOLDERS,
    "generation": ("data.output_path",),
    "evaluation": ("output.json_path", "output.plot_path", "output.scores_path"),
}
"""The keys of the output paths, by tree; these paths must differ between the runs of a sweep."""
MAX_LABEL_CHARACTERS = 150
"""A longer label of a run is truncated, because a file name has at most 255 bytes."""


@dataclass
class Run:
    """One run of a sweep, with its combination of overrides."""

    overrides: list[str]
    output_paths: dict[str, str]
    """The output paths of the run, by key."""
    exit_code: int | None = None
    """None if the run was not started."""


def run_or_sweep(
    main: Callable[[Sequence[str]], int | None],
    arguments: Sequence[str],
    schema: str,
    command: Sequence[str],
) -> int | None:
    """Calls `main` with the arguments, or runs `command` once per combination if they contain `-m`."""
    remaining_arguments = [argument for argument in arguments if argument not in SWEEP_FLAGS]
    if len(remaining_arguments) == len(arguments):
        return main(arguments)
    return sweep(remaining_arguments, schema, command)


def sweep(arguments: Sequence[str], schema: str, command: Sequence[str]) -> int:
    """Runs every combination; returns the exit code of the first failed run, or 0."""
    from hone.tracking.console import screen

    flags = [argument.partition("=")[0] for argument in arguments]
    refused_flags = [flag for flag in flags if flag in _REFUSED_FLAGS]
    if refused_flags:
        raise ConfigError(
            f"-m does not work with {refused_flags[0]}; run the command once per value"
        )
    shared_arguments, runs = combinations(arguments, schema)
    was_stopped = False
    for number, run in enumerate(runs, start=1):
        screen().line(f"run {number} of {len(runs)}: {' '.join(run.overrides)}")
        output_overrides = [path_override(key, path) for key, path in run.output_paths.items()]
        run.exit_code, was_stopped = run_python(
            [*command, *shared_arguments, *run.overrides, *output_overrides]
        )
        if was_stopped:
            break
    _print_table(runs)
    exit_code_of_stop = signal_exit_code(signal.SIGINT) if was_stopped else 0
    return next((run.exit_code for run in runs if run.exit_code), exit_code_of_stop)


def combinations(arguments: Sequence[str], schema: str) -> tuple[list[str], list[Run]]:
    """Returns the arguments that all runs share, and one run per combination of the swept arguments."""
    shared_arguments: list[str] = []
    alternatives: list[list[str]] = []
    for previous, argument in zip(["", *arguments], arguments, strict=False):
        is_value_of_flag = PROGRAM_FLAGS.get(previous, 0) > 0
        is_override = "=" in argument and not argument.startswith("-") and not is_value_of_flag
        override = parse_override(argument) if is_override else None
        if override is None or not override.is_sweep_override():
            shared_arguments.append(argument)
        else:
            prefix = argument[: len(argument) - len(argument.lstrip("+~"))]
            key = f"{prefix}{override.get_key_element().lstrip('+~')}"
            alternatives.append([f"{key}={value}" for value in _swept_values(argument, override)])
    runs = [Run(list(overrides), {}) for overrides in itertools.product(*alternatives)]
    paths_by_run = [_output_paths(shared_arguments, run.overrides, schema) for run in runs]
    labels = [_label(run.overrides) for run in runs]
    for run, paths, label in zip(runs, paths_by_run, labels, strict=True):
        if len(label) > MAX_LABEL_CHARACTERS or labels.count(label) > 1:
            digest = hashlib.sha256(" ".join(run.overrides).encode()).hexdigest()
            label = f"{label[:MAX_LABEL_CHARACTERS]}-{digest[:8]}"
        for key, path in paths.items():
            is_shared = sum(run_paths.get(key) == path for run_paths in paths_by_run) > 1
            run.output_paths[key] = _path_of_run(path, label) if is_shared else path
    return shared_arguments, runs


def _swept_values(argument: str, override: Override) -> Sequence[str]:
    """Returns the values of an override; raises an error for an interval or a glob, which has no list."""
    from hydra.errors import HydraException

    try:
        values = list(override.sweep_string_iterator())
    except HydraException:
        raise ConfigError(
            f"{argument!r} does not list its values; write key=a,b or key=range(1,4)"
        ) from None
    if len(set(values)) < len(values):  # two runs would write to one folder
        raise ConfigError(f"{argument!r} lists a value twice")
    return values


def _output_paths(
    shared_arguments: Sequence[str], overrides: Sequence[str], schema: str
) -> dict[str, str]:
    """Returns the output paths of a run by key; raises an error if the config of the run is invalid."""
    arguments = [
        argument
        for argument in (*shared_arguments, *overrides)
        if not argument.startswith("--search=")
    ]
    for flag, num_values in PROGRAM_FLAGS.items():
        if flag in arguments:
            position = arguments.index(flag)
            del arguments[position : position + 1 + num_values]
    try:
        config = compose_arguments(arguments, schema=schema, program="-m").config
    except ConfigError as error:
        run = " ".join(overrides)
        raise ConfigError([f"{problem} (run {run})" for problem in error.problems]) from None
    values: dict[str, JsonValue] = {key: get(config, key) for key in OUTPUT_KEYS[schema]}
    return {key: str(value) for key, value in values.items() if value}


def _label(overrides: Sequence[str]) -> str:
    """Returns `lr=1e-6,n=8` for a run: a file name, with `_` for special characters.

    A key is shortened to its last part if no other key has the same last part.
    """
    items = [override.lstrip("+").partition("=")[::2] for override in overrides]
    last_parts = [key.rpartition(".")[2] for key, _ in items]
    labels = []
    for (key, value), last_part in zip(items, last_parts, strict=True):
        short_key = last_part if last_parts.count(last_part) == 1 else key
        file_name_value = re.sub(r"[^\w.-]", "_", value)
        labels.append(f"{short_key}={file_name_value}")
    return ",".join(labels)


def _path_of_run(path: str, label: str) -> str:
    """Adds the label of a run to a path: as a subfolder, or before the suffix of a file."""
    output = Path(path)
    if output.suffix in (".parquet", ".json", ".jsonl", ".png"):
        return str(output.with_name(f"{output.stem}-{label}{output.suffix}"))
    return f"{path.rstrip('/')}/{label}"


def _print_table(runs: Sequence[Run]) -> None:
    from rich.table import Table

    from hone.tracking.console import screen

    results = [_result_metrics(run) for run in runs]
    names = list(dict.fromkeys(name for run_results in results for name in run_results))
    table = Table(title=f"{len(runs)} runs")
    for column in ("run", "values", "exit code", *names, "written to"):
        table.add_column(column, overflow="fold")
    for number, (run, run_results) in enumerate(zip(runs, results, strict=True), start=1):
        exit_code = "not started" if run.exit_code is None else str(run.exit_code)
        cells = [show_value(run_results[name]) if name in run_results else "" for name in names]
        files = "\n".join(run.output_paths.values())
        table.add_row(str(number), "\n".join(run.overrides), exit_code, *cells, files)
    screen().print(table)


def _result_metrics(run: Run) -> dict[str, float]:
    """Returns the last step of a run and its last validation metrics, or else its last score or loss."""
    from hone.tracking.metrics_file import MetricsFile

    folder = run.output_paths.get("trainer.default_local_dir")
    rows = list(MetricsFile(Path(folder).expanduser() / "metrics.jsonl").rows()) if folder else []
    if not rows:
        return {}
    last_values: dict[str, float] = {key: value for row in rows for key, value in row.items()}
    validation_keys = [
        key for key in last_values if key.startswith("val-core/") or key == "val/loss"
    ]
    training_keys = [key for key in ("critic/score/mean", "train/loss") if key in last_values]
    return {key: last_values[key] for key in ("step", *(validation_keys or training_keys))}
