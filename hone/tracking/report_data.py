"""Loads the data of one run for a report; unreadable data is skipped and listed in the notes."""

from __future__ import annotations

import json
import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hone.tracking.contract import flatten
from hone.tracking.metrics_file import STEP, MetricsFile, metrics_at
from hone.tracking.report_samples import Sample, StepFiles, best_and_worst, read_samples
from hone.tracking.run_folder import RunFolder, step_files
from hone.types import Fields, Row

PROMPTS_SHOWN = 6
VALIDATIONS_SHOWN = 12
HUGE = 1e300
"""Larger values are shown as infinite, because their sums and differences could overflow."""
LARGEST_STEP = 2**62
NO_ROLLOUTS = (
    "no responses of training steps are here (rollouts/step_N.parquet): "
    "trainer.rollout_steps_to_keep or trainer.rollout_data_dir keeps them"
)


class Series(NamedTuple):
    """The values of one key, ordered by step; the last value of a repeated step counts."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def finite(self) -> Series:
        finite = np.isfinite(self.values)
        return Series(self.steps[finite], self.values[finite])


EMPTY_SERIES = Series(np.empty(0, np.int64), np.empty(0))


@dataclass
class RunMetrics:
    """All series of a run by key, and the first and last step of any line."""

    series: dict[str, Series] = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    notes: list[str] = field(default_factory=list)

    def of(self, key: str) -> Series:
        return self.series.get(key, EMPTY_SERIES)


@dataclass
class RunData:
    """The data of one run for the report."""

    label: str
    metrics: RunMetrics
    config: dict[str, str] = field(default_factory=dict)
    """Dotted key -> value as JSON text."""
    origins: Fields | None = None
    """Dotted key -> where it was set; other keys have their default. None if not recorded."""
    validation: dict[str, list[Sample]] = field(default_factory=dict)
    """Prompt -> its response at each validation, oldest first."""
    best: list[Sample] = field(default_factory=list)
    worst: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def metric_names(self) -> list[str]:
        return list(self.metrics.series)


def load_run(path: str | os.PathLike[str], label: str) -> RunData:
    """Loads a run from its folder or its `metrics.jsonl`."""
    file = metrics_at(path)
    folder = RunFolder(file.parent)
    metrics = load_metrics(file)
    run = RunData(label, metrics, notes=list(metrics.notes))
    if metrics.steps is None:
        run.notes.append("metrics.jsonl has no step: the run has not finished a step")
    run.notes += _alarms(metrics)
    if not folder.config_file.exists():
        run.notes.append(f"no {folder.config_file.name}")
    run.config = _read_keys(folder.config_file, folder.read_config, _flat, run.notes) or {}
    run.origins = _read_keys(folder.origins_file, folder.read_origins, dict, run.notes)
    validations = _samples(folder.validation, run, "trainer.validation_data_dir")
    run.validation = _validation_by_prompt(validations, run.notes)
    rollouts = _samples(folder.rollouts, run, "trainer.rollout_data_dir")
    run.best, run.worst = best_and_worst(rollouts, run.notes)
    if not rollouts:
        run.notes.append(NO_ROLLOUTS)
    return run


def _alarms(metrics: RunMetrics) -> list[str]:
    """Returns a note for each alarm that the run raised (`trainer.alarms`)."""
    notes = []
    for key in sorted(metrics.series):
        name = key.removeprefix("alarms/")
        steps = metrics.of(key).steps[metrics.of(key).values > 0]
        if name not in (key, "raised") and len(steps):
            notes.append(f"alarm {name} in {len(steps)} steps, first in step {steps[0]}")
    return notes


def _flat(config: Fields) -> Fields:
    return {key: json.dumps(value, default=str) for key, value in flatten(config)}


def _read_keys(
    file: Path, read: Callable[[], Fields], convert: Callable[[Fields], Fields], notes: list[str]
) -> Fields | None:
    """Returns the keys of a file, or None if it is missing or (with a note) unreadable."""
    import yaml

    if not file.exists():
        return None
    try:
        keys = read()
        if isinstance(keys, dict):
            return convert(keys)
        notes.append(f"{file.name} is skipped: it has no keys")
    except (yaml.YAMLError, OSError, ValueError, TypeError, RecursionError) as error:
        notes.append(f"{file.name} cannot be read and is skipped: {_one_line(error)}")
    return None


def _samples(default: Path, run: RunData, key: str) -> StepFiles:
    """Returns the sample files in the run folder, or in the folder set by the run's config."""
    setting = json.loads(run.config.get(key, "null"))
    folders = [default, Path(setting)] if isinstance(setting, str) else [default]
    for folder in folders:
        try:
            if files := step_files(folder):
                return files
        except OSError as error:
            run.notes.append(f"{folder.name}/ cannot be read and is skipped: {_one_line(error)}")
    return []


def _validation_by_prompt(files: StepFiles, notes: list[str]) -> dict[str, list[Sample]]:
    """Returns prompts of the last validation, with samples of evenly spaced validations."""
    if len(files) > VALIDATIONS_SHOWN:
        gap = (len(files) - 1) / (VALIDATIONS_SHOWN - 1)
        files = [files[round(i * gap)] for i in range(VALIDATIONS_SHOWN)]
    by_file = [read_samples(step, path, notes) for step, path in files]
    if not by_file:
        return {}
    prompts = list(dict.fromkeys(sample.prompt for sample in by_file[-1]))[:PROMPTS_SHOWN]
    # The first of several responses to a prompt is shown.
    firsts = [{sample.prompt: sample for sample in reversed(samples)} for samples in by_file]
    return {prompt: [first[prompt] for first in firsts if prompt in first] for prompt in prompts}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def load_metrics(file: Path) -> RunMetrics:
    """Reads a `metrics.jsonl` line by line, which needs less memory than all dictionaries."""
    bad_lines: list[int] = []

    def rows() -> Iterator[Row]:
        for number, row in MetricsFile(file).lines():
            if row is None:
                bad_lines.append(number)
            else:
                yield row

    metrics = metrics_of(rows())
    if bad_lines:
        amount = f"{_lines(len(bad_lines))}, the first being line {bad_lines[0]}"
        metrics.notes.append(f"{file.name}: skipped lines that are not metrics ({amount})")
    return metrics


def metrics_of(rows: Iterable[Row]) -> RunMetrics:
    """Builds the series from the rows of `decode_line`."""
    steps_of: dict[str, array[int]] = defaultdict(lambda: array("q"))
    values_of: dict[str, array[float]] = defaultdict(lambda: array("d"))
    invalid: Counter[str] = Counter()
    metrics, dropped_lines = RunMetrics(), 0
    for row in rows:
        step = row[STEP]
        if abs(step) > LARGEST_STEP:
            dropped_lines += 1
            continue
        first, last = metrics.steps or (step, step)
        metrics.steps = min(first, step), max(last, step)
        for key, value in row.items():
            if key == STEP:
                continue
            try:
                values_of[key].append(value)
            except (TypeError, OverflowError):  # null, text, a list; an integer beyond floats
                invalid[key] += 1
            else:
                steps_of[key].append(step)
    if dropped_lines:
        metrics.notes.append(f"{_lines(dropped_lines)} skipped: the step is beyond ±2^62")
    for key in sorted(values_of):
        if invalid[key]:
            metrics.notes.append(
                f"{key}: skipped where it is not a number ({_lines(invalid[key])})"
            )
        if values_of[key]:
            values = np.array(values_of.pop(key))
            huge = np.isfinite(values) & (np.abs(values) > HUGE)
            if huge.any():
                values[huge] = np.copysign(np.inf, values[huge])
                amount = _lines(int(huge.sum()))
                metrics.notes.append(f"{key}: not drawn where it is beyond ±{HUGE:.0e} ({amount})")
            steps = np.array(steps_of.pop(key))
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
            last = np.append(steps[1:] != steps[:-1], True)
            metrics.series[key] = Series(steps[last], values[last])
    return metrics


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"
