"""What a report shows of one run, read from its folder: metrics, config, samples, extremes.

Tolerant by design: a run still going, killed or half copied gives a report, and what is missing or
cannot be read is left out and named in its notes. Only a folder without metrics is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hone.tracking.contract import flatten
from hone.tracking.metrics_file import metrics_at
from hone.tracking.report_metrics import RunMetrics, load_metrics
from hone.tracking.report_samples import Sample, StepFiles, extremes, read_samples
from hone.tracking.run_folder import RunFolder, step_files

PROMPTS_SHOWN = 6
VALIDATIONS_SHOWN = 12
NO_ROLLOUTS = (
    "no responses of training steps are here (rollouts/step_N.parquet): "
    "trainer.rollout_steps_to_keep or trainer.rollout_data_dir keeps them"
)


@dataclass
class RunData:
    """One run as the report sees it."""

    label: str
    metrics: RunMetrics
    config: dict[str, str] = field(default_factory=dict)
    """Dotted key -> value as JSON text."""
    origins: dict[str, str] | None = None
    """Dotted key -> where it was set; a key not in it has its default. None: not recorded."""
    validation: dict[str, list[Sample]] = field(default_factory=dict)
    """Prompt -> its response at each validation, oldest first."""
    best: list[Sample] = field(default_factory=list)
    worst: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def metric_names(self) -> list[str]:
        return list(self.metrics.series)


def load_run(path: str | os.PathLike[str], label: str) -> RunData:
    """Read a run folder, named by itself or by its `metrics.jsonl`."""
    file = metrics_at(path)
    folder = RunFolder(file.parent)
    metrics = load_metrics(file)
    run = RunData(label, metrics, notes=list(metrics.notes))
    if metrics.steps is None:
        run.notes.append("metrics.jsonl holds no step: the run has not finished a step")
    run.config = _config(folder, run.notes)
    run.origins = _origins(folder, run.notes)
    validations = _kept(folder.validation, run.config, "trainer.validation_data_dir", run.notes)
    run.validation = _validation_by_prompt(validations, run.notes)
    rollouts = _kept(folder.rollouts, run.config, "trainer.rollout_data_dir", run.notes)
    run.best, run.worst = extremes(rollouts, run.notes)
    if not rollouts:
        run.notes.append(NO_ROLLOUTS)
    return run


def labels_of(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Folder names, with parents where two are the same."""
    resolved = [Path(path).resolve() for path in paths]
    resolved = [path.parent if path.is_file() else path for path in resolved]
    labels = [path.name for path in resolved]
    if len(set(labels)) < len(labels):
        labels = [f"{path.parent.name}/{path.name}" for path in resolved]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({number})" for number, label in enumerate(labels, start=1)]
    return labels


def _config(folder: RunFolder, notes: list[str]) -> dict[str, str]:
    """Dotted key -> value as JSON text; empty, with a note, where there is no config to be read."""
    import yaml

    name = folder.config_file.name
    if not folder.config_file.exists():
        notes.append(f"no {name}")
        return {}
    try:
        config = folder.read_config()
        if isinstance(config, dict):
            return {key: json.dumps(value, default=str) for key, value in flatten(config)}
        notes.append(f"{name} is left out: it holds no keys")
    except (yaml.YAMLError, OSError, ValueError, TypeError, RecursionError) as error:
        notes.append(f"{name} cannot be read and is left out: {_short(error)}")
    return {}


def _origins(folder: RunFolder, notes: list[str]) -> dict[str, str] | None:
    name = folder.origins_file.name
    if not folder.origins_file.exists():
        return None
    try:
        origins = folder.read_origins()
        if isinstance(origins, dict):
            return origins
        notes.append(f"{name} is left out: it holds no keys")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{name} cannot be read and is left out: {_short(error)}")
    return None


def _kept(inside: Path, config: dict[str, str], key: str, notes: list[str]) -> StepFiles:
    """Sample files in the run folder, or where the run's config put them instead."""
    elsewhere = json.loads(config.get(key, "null"))
    folders = [inside, Path(elsewhere)] if isinstance(elsewhere, str) else [inside]
    for folder in folders:
        try:
            files = step_files(folder)
        except OSError as error:
            notes.append(f"{folder.name}/ cannot be read and is left out: {_short(error)}")
            continue
        if files:
            return files
    return []


def _validation_by_prompt(files: StepFiles, notes: list[str]) -> dict[str, list[Sample]]:
    """The first prompts of the last validation, each through all (or evenly chosen) validations."""
    chosen = _evenly(files, VALIDATIONS_SHOWN)
    by_file = [read_samples(step, path, notes) for step, path in chosen]
    if not by_file:
        return {}
    prompts = list(dict.fromkeys(sample.prompt for sample in by_file[-1]))[:PROMPTS_SHOWN]
    story: dict[str, list[Sample]] = {prompt: [] for prompt in prompts}
    for samples in by_file:
        first: dict[str, Sample] = {}
        for sample in samples:
            first.setdefault(sample.prompt, sample)
        for prompt in prompts:
            if prompt in first:
                story[prompt].append(first[prompt])
    return story


def _evenly(files: StepFiles, at_most: int) -> StepFiles:
    if len(files) <= at_most:
        return files
    last = len(files) - 1
    return [files[round(i * last / (at_most - 1))] for i in range(at_most)]


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
