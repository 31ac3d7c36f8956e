"""`Tracking`: one call to log a step, any number of places it goes to.

Names map to classes in one table; a user's own tracker is `"pkg.mod:Class"`. Metrics are numbers
here already: what they mean and how they were reduced is the trainer's matter.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from hone.plugins import Table
from hone.tracking.contract import Number, RunInfo, Scalar, Tracker, TrackerError, as_numbers
from hone.tracking.run_folder import RunFolder
from hone.tracking.storage import storage_failure
from hone.types import JsonValue, Row, Settings

log = logging.getLogger(__name__)

TRACKERS: Table[Callable[[RunInfo], Tracker]] = Table(
    "tracker in trainer.logger",
    {
        "console": "hone.tracking.console:ConsoleTracker",
        "jsonl": "hone.tracking.jsonl:JsonlTracker",
        "file": "hone.tracking.jsonl:JsonlTracker",
        "tensorboard": "hone.tracking.tensorboard:TensorboardTracker",
        "wandb": "hone.tracking.wandb:WandbTracker",
        "mlflow": "hone.tracking.mlflow:MlflowTracker",
        "swanlab": "hone.tracking.swanlab:SwanlabTracker",
    },
)
ALIASES = {"file": "jsonl"}
"""`file` is what verl calls its JSON-lines logger."""


class Tracking:
    """Hand a step's metrics to every tracker.

    A run with a folder always keeps `metrics.jsonl`, named as a backend or not: resuming, curves
    and reports read it. If that write fails the run stops; a failure of any other tracker is
    logged, counted in `tracking/failures/<name>`, and the run goes on.
    """

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        default_backend: str | Sequence[str] = "console",
        config: Settings | None = None,
        run_folder: RunFolder | str | os.PathLike[str] | None = None,
        *,
        total_steps: int | None = None,
        resumed_from: int | None = None,
        prints_everything: bool = False,
    ) -> None:
        if isinstance(run_folder, RunFolder):
            folder: Path | None = run_folder.path
        else:
            folder = Path(run_folder) if run_folder is not None else None
        run = RunInfo(
            project_name,
            experiment_name,
            config or {},
            folder,
            total_steps,
            resumed_from,
            prints_everything,
        )
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        names = [ALIASES.get(name, name) for name in names]
        # The record is written first: a tracker that fails later cannot lose the step.
        names = ["jsonl", *names] if folder is not None else names
        self.trackers: dict[str, Tracker] = {}
        for name in dict.fromkeys(names):
            self.trackers[name] = TRACKERS.get(name)(run)
        self.failures: dict[str, int] = {}

    def log(
        self,
        data: Mapping[str, Number | Scalar],
        step: int,
        backend: str | Sequence[str] | None = None,
    ) -> None:
        """Hand one step's metrics to all trackers, or to those named in `backend`."""
        numbers = as_numbers(data)
        numbers |= {f"tracking/failures/{name}": n for name, n in self.failures.items()}
        for name in self._chosen(backend):
            self._guarded(name, partial(self.trackers[name].log, numbers, step))

    def _chosen(self, backend: str | Sequence[str] | None) -> list[str]:
        if backend is None:
            return list(self.trackers)
        names = [backend] if isinstance(backend, str) else list(backend)
        names = [ALIASES.get(name, name) for name in names]
        for name in names:
            if name not in self.trackers:
                raise TrackerError(
                    f"no tracker {name!r} in this run; it has {', '.join(self.trackers) or 'none'}"
                )
        return names

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Show sample rows (validation generations, say) in the trackers that have tables."""
        for key, tracker in self.trackers.items():
            self._guarded(key, partial(tracker.log_samples, name, rows, step))

    def finish(self) -> None:
        """Flush and close every tracker; calling it twice does no harm."""
        trackers, self.trackers = self.trackers, {}
        for name, tracker in trackers.items():
            self._guarded(name, tracker.finish, is_the_record=tracker.is_the_record)
        for name, count in self.failures.items():
            log.warning("tracker %r failed %d times; metrics.jsonl is complete", name, count)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *exc: object) -> None:
        self.finish()

    def _guarded(
        self, name: str, action: Callable[[], None], is_the_record: bool | None = None
    ) -> None:
        if is_the_record is None:
            is_the_record = self.trackers[name].is_the_record
        try:
            action()
        except Exception as error:
            # Remote trackers raise whatever their transport raises; none of it may end training.
            if is_the_record:
                raise
            self.failures[name] = self.failures.get(name, 0) + 1
            if self.failures[name] == 1:
                # A full disk has no line of code to show.
                traceback = storage_failure(error) is None
                log.warning(
                    "tracker %r failed (%r); the run goes on", name, error, exc_info=traceback
                )


class ValidationGenerationsLogger:
    """Shows generations of a validation in the trackers that have tables; verl's name."""

    def __init__(self, project_name: str | None = None, experiment_name: str | None = None) -> None:
        self._names = (project_name or "project", experiment_name or "experiment")
        self._tracking: dict[tuple[str, ...], Tracking] = {}

    def log(
        self, loggers: str | Sequence[str], samples: Sequence[Sequence[JsonValue]], step: int
    ) -> None:
        """`samples` are (input, output, score)."""
        chosen = (loggers,) if isinstance(loggers, str) else tuple(loggers)
        if chosen not in self._tracking:
            self._tracking[chosen] = Tracking(*self._names, chosen)
        names = ("input", "output", "score")
        rows = [dict(zip(names, sample, strict=False)) for sample in samples]
        self._tracking[chosen].log_samples("val/generations", rows, step)
