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

from hone.redaction import redact
from hone.tracking.contract import flatten
from hone.tracking.metrics_file import STEP_KEY, MetricsFile, MetricsRow, find_metrics_file
from hone.tracking.report_samples import Sample, StepFiles, best_and_worst, read_samples
from hone.tracking.run_folder import RunFolder, step_files
from hone.types import Fields

PROMPTS_SHOWN = 6
VALIDATIONS_SHOWN = 12
MAX_STEP = 2**62
"""Lines of later steps are skipped, because the difference of two steps must fit in 64 bits."""
MAX_DRAWN = 1e300
"""Larger values are treated as infinite, because their sums and differences could overflow."""
NO_ROLLOUTS_NOTE = (
    "no responses of training steps were kept (rollouts/step_N.parquet); "
    "set trainer.rollout_steps_to_keep or trainer.rollout_data_dir"
)


class Series(NamedTuple):
    """The values of one key, ordered by step; a repeated step has its last value."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def finite_points(self) -> Series:
        is_finite = np.isfinite(self.values)
        return Series(self.steps[is_finite], self.values[is_finite])


EMPTY_SERIES = Series(np.empty(0, np.int64), np.empty(0))


@dataclass
class RunMetrics:
    """All series of a run by key."""

    series: dict[str, Series] = field(default_factory=dict)
    step_range: tuple[int, int] | None = None
    """The lowest and highest step of all lines; None without lines."""
    notes: list[str] = field(default_factory=list)

    def get(self, key: str) -> Series:
        return self.series.get(key, EMPTY_SERIES)


@dataclass
class RunData:
    """The data of one run for the report."""

    label: str
    metrics: RunMetrics
    config: dict[str, str] = field(default_factory=dict)
    """Dotted key → value as JSON text."""
    origins: Fields | None = None
    """Dotted key → where it was set; other keys have their default. None if not recorded."""
    validation: dict[str, list[Sample]] = field(default_factory=dict)
    """Prompt → one response per validation, oldest first."""
    best: list[Sample] = field(default_factory=list)
    worst: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def metric_names(self) -> list[str]:
        return list(self.metrics.series)


def load_run(path: str | os.PathLike[str], label: str) -> RunData:
    """Loads a run from its folder or its `metrics.jsonl`."""
    file = find_metrics_file(path)
    folder = RunFolder(file.parent)
    metrics = load_metrics(file)
    run = RunData(label, metrics, notes=list(metrics.notes))
    if metrics.step_range is None:
        run.notes.append("metrics.jsonl has no line: the run has not finished a step")
    for key in sorted(metrics.series):  # `trainer.alarms` writes alarms/NAME and alarms/raised
        name = key.removeprefix("alarms/")
        steps = metrics.get(key).steps[metrics.get(key).values > 0]
        if name not in (key, "raised") and len(steps):
            run.notes.append(f"alarm {name} in {len(steps)} steps, first in step {steps[0]}")
    if not folder.config_file.exists():
        run.notes.append(f"no {folder.config_file.name}")
    config = _read_settings(folder.config_file, folder.read_config, run.notes, flat=True)
    run.config = config or {}
    run.origins = _read_settings(folder.config_origins_file, folder.read_config_origins, run.notes)
    validations = _find_sample_files(folder.validation, run, "trainer.validation_data_dir")
    run.validation = _validation_by_prompt(validations, run.notes)
    rollouts = _find_sample_files(folder.rollouts, run, "trainer.rollout_data_dir")
    run.best, run.worst = best_and_worst(rollouts, run.notes)
    if not rollouts:
        run.notes.append(NO_ROLLOUTS_NOTE)
    return run


def _read_settings(
    file: Path, read: Callable[[], Fields], notes: list[str], *, flat: bool = False
) -> Fields | None:
    """Returns the settings in a file; None if the file is missing or, with a note, if it is unreadable.

    With `flat`, the settings are JSON texts by dotted key.
    """
    import yaml

    if not file.exists():
        return None
    try:
        settings = read()
        if isinstance(settings, dict) and flat:
            return {key: json.dumps(value, default=str) for key, value in flatten(redact(settings))}
        if isinstance(settings, dict):
            return settings
        notes.append(f"{file.name} is skipped: it has no keys")
    except (yaml.YAMLError, OSError, ValueError, TypeError, RecursionError) as error:
        notes.append(f"{file.name} cannot be read and is skipped: {_one_line(error)}")
    return None


def _find_sample_files(default_folder: Path, run: RunData, folder_key: str) -> StepFiles:
    """Returns the sample files in the default folder, or else in the folder that the config key sets."""
    setting = json.loads(run.config.get(folder_key, "null"))
    folders = [default_folder, Path(setting)] if isinstance(setting, str) else [default_folder]
    for folder in folders:
        try:
            if files := step_files(folder):
                return files
        except OSError as error:
            run.notes.append(f"{folder.name}/ cannot be read and is skipped: {_one_line(error)}")
    return []


def _validation_by_prompt(files: StepFiles, notes: list[str]) -> dict[str, list[Sample]]:
    """Returns samples of evenly spaced validations, by prompt of the last validation."""
    if len(files) > VALIDATIONS_SHOWN:
        spacing = (len(files) - 1) / (VALIDATIONS_SHOWN - 1)
        files = [files[round(i * spacing)] for i in range(VALIDATIONS_SHOWN)]
    samples_by_file = [read_samples(step, path, notes) for step, path in files]
    if not samples_by_file:
        return {}
    prompts = list(dict.fromkeys(sample.prompt for sample in samples_by_file[-1]))[:PROMPTS_SHOWN]
    # The first of several responses to a prompt is shown.
    first_samples = [
        {sample.prompt: sample for sample in reversed(samples)} for samples in samples_by_file
    ]
    return {
        prompt: [by_prompt[prompt] for by_prompt in first_samples if prompt in by_prompt]
        for prompt in prompts
    }


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def load_metrics(file: Path) -> RunMetrics:
    """Reads a `metrics.jsonl` line by line, which needs less memory than a list of all rows."""
    bad_line_numbers: list[int] = []

    def valid_rows() -> Iterator[MetricsRow]:
        for number, row in MetricsFile(file).lines():
            if row is None:
                bad_line_numbers.append(number)
            else:
                yield row

    metrics = collect_series(valid_rows())
    if bad_line_numbers:
        count = f"{_count_text(len(bad_line_numbers))}, the first being line {bad_line_numbers[0]}"
        metrics.notes.append(f"{file.name}: skipped lines that are not metrics ({count})")
    return metrics


def collect_series(rows: Iterable[MetricsRow]) -> RunMetrics:
    """Builds the series of each metric from the rows of a metrics file."""
    steps_by_key: dict[str, array[int]] = defaultdict(lambda: array("q"))
    values_by_key: dict[str, array[float]] = defaultdict(lambda: array("d"))
    invalid_counts: Counter[str] = Counter()
    metrics, num_skipped_lines = RunMetrics(), 0
    for row in rows:
        step = row[STEP_KEY]
        if abs(step) > MAX_STEP:
            num_skipped_lines += 1
            continue
        first, last = metrics.step_range or (step, step)
        metrics.step_range = min(first, step), max(last, step)
        for key, value in row.items():
            if key == STEP_KEY:
                continue
            try:
                values_by_key[key].append(value)
            except (TypeError, OverflowError):  # null, text, a list; an integer beyond floats
                invalid_counts[key] += 1
            else:
                steps_by_key[key].append(step)
    if num_skipped_lines:
        metrics.notes.append(f"{_count_text(num_skipped_lines)} skipped: the step is beyond ±2^62")
    for key in sorted(values_by_key):
        if invalid_counts[key]:
            metrics.notes.append(
                f"{key}: skipped where it is not a number ({_count_text(invalid_counts[key])})"
            )
        if values_by_key[key]:
            steps, values = np.array(steps_by_key.pop(key)), np.array(values_by_key.pop(key))
            is_huge = np.isfinite(values) & (np.abs(values) > MAX_DRAWN)
            if is_huge.any():
                values[is_huge] = np.copysign(np.inf, values[is_huge])
                count = _count_text(int(is_huge.sum()))
                metrics.notes.append(
                    f"{key}: not drawn where it is beyond ±{MAX_DRAWN:.0e} ({count})"
                )
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
            is_last_of_step = np.append(steps[1:] != steps[:-1], True)
            metrics.series[key] = Series(steps[is_last_of_step], values[is_last_of_step])
    return metrics


def _count_text(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"
