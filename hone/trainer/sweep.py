"""Runs a program once per combination of `-m key=a,b`, sequentially, and prints a table of results.

All combinations are checked before the first run starts. A failed run does not stop the others.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hone.config.convert import show_value
from hone.config.errors import ConfigError
from hone.config.keys import get
from hone.config.sources import parse_override
from hone.trainer.command_line import compose_arguments
from hone.trainer.ranks import run_python
from hone.types import JsonValue

FLAGS = ("-m", "--multirun")
OUTPUTS = {
    "ppo_trainer": ("trainer.default_local_dir",),
    "sft_trainer": ("trainer.default_local_dir",),
    "prm_trainer": ("trainer.default_local_dir",),
    "rm_trainer": ("trainer.default_local_dir",),
    "generation": ("data.output_path",),
    "evaluation": ("output.json_path", "output.plot_path", "output.scores_path"),
}
"""The output paths, by config, that must differ between the runs of a sweep."""


@dataclass
class Run:
    """One combination of a sweep."""

    overrides: list[str]
    outputs: dict[str, str]
    code: int | None = None
    """The exit code; None if the run was not started."""


def run_or_sweep(
    main: Callable[[Sequence[str]], int | None],
    arguments: Sequence[str],
    schema: str,
    command: Sequence[str],
) -> int | None:
    """Runs a program once, or as a sweep if its arguments have `-m`; `command` starts each run."""
    if not any(flag in arguments for flag in FLAGS):
        return main(arguments)
    return sweep([text for text in arguments if text not in FLAGS], schema, command)


def sweep(arguments: Sequence[str], schema: str, command: Sequence[str]) -> int:
    """Runs every combination; return the exit code of the first failed run, or 0."""
    from hone.tracking.console import screen

    shared, runs = combinations(arguments, schema)
    was_stopped = False
    for number, run in enumerate(runs, start=1):
        screen().line(f"run {number} of {len(runs)}: {' '.join(run.overrides)}")
        quoted = {k: v.replace("\\", "\\\\").replace("'", "\\'") for k, v in run.outputs.items()}
        outputs = [f"{key}='{value}'" for key, value in quoted.items()]
        run.code, was_stopped = run_python([*command, *shared, *run.overrides, *outputs])
        if was_stopped:
            break
    _show(runs)
    return next((run.code for run in runs if run.code), 0)


def combinations(arguments: Sequence[str], schema: str) -> tuple[list[str], list[Run]]:
    """Returns the arguments that all runs share, and the runs."""
    shared: list[str] = []
    choices: list[list[str]] = []
    for text in arguments:
        parsed = parse_override(text) if "=" in text and not text.startswith("-") else None
        if parsed is None or not parsed.is_sweep_override():
            shared.append(text)
        else:
            sign = text[: len(text) - len(text.lstrip("+~"))]
            key = f"{sign}{parsed.get_key_element().lstrip('+~')}"
            choices.append([f"{key}={value}" for value in parsed.sweep_string_iterator()])
    runs = [Run(list(values), {}) for values in itertools.product(*choices)]
    outputs = [_outputs(shared, run.overrides, schema) for run in runs]
    for run, run_outputs in zip(runs, outputs, strict=True):
        if sum(run_outputs == other for other in outputs) > 1:  # each run needs its own output path
            run_outputs = {key: _run_path(path, run.overrides) for key, path in run_outputs.items()}
        run.outputs = run_outputs
    return shared, runs


def _outputs(shared: Sequence[str], overrides: Sequence[str], schema: str) -> dict[str, str]:
    try:
        config = compose_arguments([*shared, *overrides], schema=schema, program="-m").config
    except ConfigError as error:
        run = " ".join(overrides)
        raise ConfigError([f"{problem} (run {run})" for problem in error.problems]) from None
    values: dict[str, JsonValue] = {key: get(config, key) for key in OUTPUTS[schema]}
    return {key: str(value) for key, value in values.items() if value}


def _run_path(path: str, overrides: Sequence[str]) -> str:
    """Adds the values of a run to a path: as a subfolder, or before the suffix of a file."""
    pairs = [text.lstrip("+").partition("=")[::2] for text in overrides]
    names = [key.rpartition(".")[2] for key, _ in pairs]
    keys = [
        name if names.count(name) == 1 else key for (key, _), name in zip(pairs, names, strict=True)
    ]
    values = [re.sub(r"[^\w.-]", "_", value) for _, value in pairs]
    label = ",".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
    output = Path(path)
    if output.suffix in (".parquet", ".json", ".jsonl", ".png"):
        return str(output.with_name(f"{output.stem}-{label}{output.suffix}"))
    return str(output / label)


def _show(runs: Sequence[Run]) -> None:
    from rich.table import Table

    from hone.tracking.console import screen

    results = [_results(run) for run in runs]
    names = list(dict.fromkeys(name for run_results in results for name in run_results))
    table = Table(title=f"{len(runs)} runs")
    for column in ("run", "values", "exit code", *names, "written to"):
        table.add_column(column, overflow="fold")
    for number, (run, run_results) in enumerate(zip(runs, results, strict=True), start=1):
        code = "not started" if run.code is None else str(run.code)
        cells = [show_value(run_results[name]) if name in run_results else "" for name in names]
        files = "\n".join(run.outputs.values())
        table.add_row(str(number), "\n".join(run.overrides), code, *cells, files)
    screen().print(table)


def _results(run: Run) -> dict[str, float]:
    """Returns the last step of a run, with its last validation metrics, else its score or loss."""
    from hone.tracking.metrics_file import MetricsFile

    folder = run.outputs.get("trainer.default_local_dir")
    rows = list(MetricsFile(Path(folder).expanduser() / "metrics.jsonl").rows()) if folder else []
    if not rows:
        return {}
    last: dict[str, float] = {key: value for row in rows for key, value in row.items()}
    core = [key for key in last if key.startswith("val-core/") or key == "val/loss"]
    measures = [key for key in ("critic/score/mean", "train/loss") if key in last]
    return {key: last[key] for key in ("step", *(core or measures))}
