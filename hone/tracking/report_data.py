"""What a report shows of one run, read from its folder: metrics, config, samples, extremes.

Tolerant by design: a run still going, killed or half copied gives a report with notes on what is
missing. Only a folder without metrics is refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.tracking.contract import flatten
from hone.tracking.metrics_file import read_metrics
from hone.tracking.run_folder import RunFolder, step_files

PROMPTS_SHOWN = 6
VALIDATIONS_SHOWN = 12
EXTREMES_SHOWN = 5


@dataclass(frozen=True)
class Sample:
    """One response and what it earned."""

    step: int
    uid: str
    prompt: str
    response: str
    score: float | None
    parts: dict[str, float] = field(default_factory=dict)
    """Reward parts by name."""


@dataclass
class RunData:
    """One run as the report sees it."""

    label: str
    rows: list[dict[str, Any]]
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
        return sorted({key for row in self.rows for key in row if key != "step"})


def load_run(path: str | os.PathLike[str], label: str) -> RunData:
    folder = RunFolder(path)
    run = RunData(label, read_metrics(folder.metrics_file))
    run.config = {key: json.dumps(value, default=str) for key, value in flatten(_config(folder))}
    if folder.origins_file.exists():
        run.origins = folder.read_origins()
    if not run.rows:
        run.notes.append("metrics.jsonl is empty: the run has not finished a step")
    if not run.config:
        run.notes.append("no config.yaml")
    validations = _kept(folder.validation_files(), run.config, "trainer.validation_data_dir")
    run.validation = _validation_by_prompt(validations, run.notes)
    rollouts = _kept(folder.rollout_files(), run.config, "trainer.rollout_data_dir")
    run.best = _extremes(rollouts, run.notes, best=True)
    run.worst = _extremes(rollouts, [], best=False)
    if not rollouts:
        run.notes.append("no rollouts were kept (rollouts/step_N.parquet)")
    return run


def labels_of(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Folder names, with parents where two are the same."""
    resolved = [Path(path).resolve() for path in paths]
    labels = [path.name for path in resolved]
    if len(set(labels)) < len(labels):
        labels = [f"{path.parent.name}/{path.name}" for path in resolved]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({number})" for number, label in enumerate(labels, start=1)]
    return labels


def _config(folder: RunFolder) -> dict[str, Any]:
    config = folder.read_config()
    return config if isinstance(config, dict) else {}


def _kept(
    inside: list[tuple[int, Path]], config: dict[str, str], key: str
) -> list[tuple[int, Path]]:
    """Sample files in the run folder, or where the run's config put them instead."""
    elsewhere = json.loads(config.get(key, "null"))
    if inside or not isinstance(elsewhere, str):
        return inside
    return step_files(Path(elsewhere))


def _validation_by_prompt(
    files: list[tuple[int, Path]], notes: list[str]
) -> dict[str, list[Sample]]:
    """The first prompts of the last validation, each through all (or evenly chosen) validations."""
    chosen = _evenly(files, VALIDATIONS_SHOWN)
    by_file = [list(_samples(step, path, notes)) for step, path in chosen]
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


def _evenly(files: list[tuple[int, Path]], at_most: int) -> list[tuple[int, Path]]:
    if len(files) <= at_most:
        return files
    last = len(files) - 1
    return [files[round(i * last / (at_most - 1))] for i in range(at_most)]


def _extremes(files: list[tuple[int, Path]], notes: list[str], *, best: bool) -> list[Sample]:
    """Best or worst scored responses of a run, one a prompt; of equals, the latest.

    Scores are read from every file, texts only for those shown: a long run stays cheap.
    """
    ranked: list[tuple[float, int, Path, int, str]] = []
    for step, path in files:
        table = _columns(path, ("score", "uid"), notes)
        if table is None or "score" not in table:
            continue
        uids = table.get("uid") or [f"{step}:{row}" for row in range(len(table["score"]))]
        for row, (score, uid) in enumerate(zip(table["score"], uids, strict=True)):
            if score is not None and math.isfinite(score):
                ranked.append((float(score), step, path, row, str(uid)))
        ranked = _top(ranked, best=best)
    texts: dict[Path, list[Sample]] = {}
    shown = []
    for _, step, path, row, _ in ranked:
        if path not in texts:
            texts[path] = list(_samples(step, path, notes))
        if row < len(texts[path]):
            shown.append(texts[path][row])
    return shown


def _top(
    ranked: list[tuple[float, int, Path, int, str]], *, best: bool
) -> list[tuple[float, int, Path, int, str]]:
    sign = -1 if best else 1
    ordered = sorted(ranked, key=lambda item: (sign * item[0], -item[1], item[3]))
    kept: dict[str, tuple[float, int, Path, int, str]] = {}
    for item in ordered:
        kept.setdefault(item[4], item)
        if len(kept) == EXTREMES_SHOWN:
            break
    return list(kept.values())


def _samples(step: int, path: Path, notes: list[str]) -> Iterator[Sample]:
    table = _columns(path, None, notes)
    if table is None:
        return
    count = len(next(iter(table.values()), []))
    empty: list[Any] = [None] * count
    parts = [name for name in table if name.startswith("reward/")]
    for row in range(count):
        score = table.get("score", empty)[row]
        yield Sample(
            step=step,
            uid=str(table.get("uid", empty)[row]),
            prompt=str(table.get("prompt_text", empty)[row] or ""),
            response=str(table.get("response_text", empty)[row] or ""),
            score=None if score is None else float(score),
            parts={
                name.removeprefix("reward/"): float(table[name][row])
                for name in parts
                if isinstance(table[name][row], int | float)
            },
        )


def _columns(
    path: Path, names: Sequence[str] | None, notes: list[str]
) -> dict[str, list[Any]] | None:
    """The named columns a parquet file has (default: those a sample needs); None if unreadable."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
        there = file.schema_arrow.names
        if names is None:
            wanted = {"uid", "prompt_text", "response_text", "score"}
            names = [n for n in there if n in wanted or n.startswith("reward/")]
        return file.read(columns=[n for n in names if n in there]).to_pydict()
    except (pyarrow.ArrowException, OSError) as error:
        note = f"{path.parent.name}/{path.name} cannot be read and is left out: {error}"
        if note not in notes:
            notes.append(note)
        return None
