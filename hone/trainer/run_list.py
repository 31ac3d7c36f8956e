"""`hone runs [FOLDER]` lists the runs below a folder: state, step, best metric, time since the last step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hone.tracking import RunFolder
from hone.tracking.lock import live_holder
from hone.tracking.report import MetricResult, format_number, headline
from hone.tracking.report_data import RunData, load_metrics
from hone.trainer.command_line import ERROR_LOG

if TYPE_CHECKING:
    from rich.table import Table

MAX_DEPTH = 4
"""Run folders are looked for in this many levels below the folder."""
SECONDS_BY_UNIT = {"d": 86400, "h": 3600, "min": 60, "s": 1}


@dataclass(frozen=True)
class RunState:
    """One line of the list."""

    path: Path
    state: str
    """running, finished (all steps are done), failed (error.log is newer than the last step), or stopped."""
    step: int | None
    total_steps: int | None
    best: MetricResult | None
    age_s: float
    """Seconds since the last step."""

    @property
    def best_text(self) -> str:
        if self.best is None:
            return "–"
        return f"{format_number(self.best.best)} at {self.best.best_step} ({self.best.key})"


def find_runs(folder: Path) -> Iterator[Path]:
    """Yields the folders below `folder`, itself included, that have a `metrics.jsonl`."""
    for path, names, files in os.walk(folder):
        depth = len(Path(path).relative_to(folder).parts)
        if "metrics.jsonl" in files or depth == MAX_DEPTH:
            names.clear()
        names[:] = sorted(name for name in names if not name.startswith("."))
        if "metrics.jsonl" in files:
            yield Path(path)


def run_state(path: Path) -> RunState:
    """Reads the state of the run in a folder; what cannot be read is left out."""
    run = RunFolder(path)
    metrics = load_metrics(run.metrics_file)
    step = None if metrics.step_range is None else metrics.step_range[1]
    trainer = run.read_config_or_empty().get("trainer")
    total_steps = trainer.get("total_training_steps") if isinstance(trainer, dict) else None
    total_steps = total_steps if isinstance(total_steps, int) and total_steps > 0 else None
    last_step_s = run.metrics_file.stat().st_mtime
    error_log = path / ERROR_LOG
    state = "stopped"
    if live_holder(path):
        state = "running"
    elif step is not None and total_steps is not None and step >= total_steps:
        state = "finished"
    elif error_log.exists() and error_log.stat().st_mtime >= last_step_s:
        state = "failed"
    best = headline(RunData(path.name, metrics))
    return RunState(path, state, step, total_steps, best, max(time.time() - last_step_s, 0.0))


def run_table(folder: Path) -> Table | None:
    """Returns the table of the runs below a folder, the last active first; None if there is no run."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Column, Table

    runs = sorted(map(run_state, find_runs(folder)), key=lambda run: run.age_s)
    columns = ("run", "state", "step", "best", "last step")
    table = Table(*(Column(name, overflow="fold") for name in columns), box=SIMPLE)
    for run in runs:
        step = "–" if run.step is None else str(run.step)
        total = f"/{run.total_steps}" if run.total_steps else ""
        table.add_row(
            escape(str(run.path)),
            run.state,
            step + total,
            escape(run.best_text),
            f"{age(run.age_s)} ago",
        )
    return table if runs else None


def age(seconds: float) -> str:
    """Formats seconds in their largest whole unit, as `5 min`."""
    unit, unit_s = next((item for item in SECONDS_BY_UNIT.items() if seconds >= item[1]), ("s", 1))
    return f"{int(seconds // unit_s)} {unit}"
