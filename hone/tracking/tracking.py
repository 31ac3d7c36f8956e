"""`Tracking` sends the metrics of a step to any number of trackers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from hone.plugins import Table
from hone.redaction import redact
from hone.tracking.atomic import storage_errno
from hone.tracking.contract import (
    Number,
    RunInfo,
    Scalar,
    Tracker,
    TrackerError,
    as_numbers,
    import_optional,
)
from hone.tracking.run_folder import RunFolder
from hone.types import JsonValue, Row, Settings

log = logging.getLogger(__name__)

TRACKERS: Table[Callable[[RunInfo], Tracker]] = Table(
    "tracker in trainer.logger",
    {
        "console": "hone.tracking.console:ConsoleTracker",
        "jsonl": "hone.tracking.metrics_file:JsonlTracker",
        "file": "hone.tracking.metrics_file:JsonlTracker",
        "tensorboard": "hone.tracking.tensorboard:TensorboardTracker",
        "wandb": "hone.tracking.wandb:WandbTracker",
        "mlflow": "hone.tracking.mlflow:MlflowTracker",
        "swanlab": "hone.tracking.swanlab:SwanlabTracker",
    },
)


def _tracker_names(backend: str | Sequence[str]) -> list[str]:
    """Returns the names as a list; `file` is verl's name for `jsonl`."""
    names = [backend] if isinstance(backend, str) else backend
    return ["jsonl" if name == "file" else name for name in names]


def check_trackers(backend: str | Sequence[str]) -> None:
    """Raises an error for a tracker that cannot be imported, or whose package is not installed."""
    for name in _tracker_names(backend):
        if package := getattr(TRACKERS.get(name), "package", None):
            import_optional(package, name)


class Tracking:
    """Sends the metrics of each step to every tracker.

    A run with a folder always writes `metrics.jsonl`, and stops if that write fails. The failure of any other
    tracker is logged and counted in `tracking/failures/<name>`.
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
        will_train: bool = True,
        prints_every_metric: bool = False,
    ) -> None:
        path = run_folder.path if isinstance(run_folder, RunFolder) else run_folder
        folder = None if path is None else Path(path)
        run = RunInfo(
            project_name,
            experiment_name,
            redact(config or {}),
            folder,
            total_steps,
            resumed_from,
            will_train,
            prints_every_metric,
        )
        # metrics.jsonl is written first, so that it has the step even if another tracker fails.
        names = [*(["jsonl"] if folder is not None else []), *_tracker_names(default_backend)]
        self.trackers = {name: TRACKERS.get(name)(run) for name in dict.fromkeys(names)}
        self.failures: dict[str, int] = {}

    def log(
        self,
        data: Mapping[str, Number | Scalar],
        step: int,
        backend: str | Sequence[str] | None = None,
    ) -> None:
        """Sends the metrics of one step to all trackers, or to those named in `backend`."""
        numbers = as_numbers(data)
        numbers |= {f"tracking/failures/{name}": count for name, count in self.failures.items()}
        names = list(self.trackers) if backend is None else _tracker_names(backend)
        for name in names:
            if name not in self.trackers:
                raise TrackerError(
                    f"no tracker {name!r} in this run; it has {', '.join(self.trackers) or 'none'}"
                )
        for name in names:
            tracker = self.trackers[name]
            self._call_tracker(name, tracker, partial(tracker.log, numbers, step))

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        """Shows sample rows, such as validation generations, in the trackers that have tables."""
        for tracker_name, tracker in self.trackers.items():
            action = partial(tracker.log_samples, name, rows, step)
            self._call_tracker(tracker_name, tracker, action)

    def finish(self) -> None:
        """Flushes and closes every tracker; a second call does nothing."""
        trackers, self.trackers = self.trackers, {}
        for name, tracker in trackers.items():
            self._call_tracker(name, tracker, tracker.finish)
        for name, count in self.failures.items():
            log.warning("tracker %r failed %d times; metrics.jsonl is complete", name, count)

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *exc: object) -> None:
        self.finish()

    def _call_tracker(self, name: str, tracker: Tracker, action: Callable[[], None]) -> None:
        """Calls the action; counts its failure unless failures of this tracker stop the run."""
        try:
            action()
        except Exception as error:
            # Remote trackers may raise any error of their transport, which must not stop training.
            if tracker.stops_run_on_failure:
                raise
            self.failures[name] = self.failures.get(name, 0) + 1
            if self.failures[name] == 1:
                needs_traceback = storage_errno(error) is None  # not if the disk is full
                message = "tracker %r failed (%r); the run continues"
                log.warning(message, name, error, exc_info=needs_traceback)


class ValidationGenerationsLogger:
    """Shows validation generations in the trackers that have tables; the name is verl's."""

    def __init__(self, project_name: str | None = None, experiment_name: str | None = None) -> None:
        self._run_names = (project_name or "project", experiment_name or "experiment")
        self._tracking: dict[tuple[str, ...], Tracking] = {}

    def log(
        self, loggers: str | Sequence[str], samples: Sequence[Sequence[JsonValue]], step: int
    ) -> None:
        """Logs the samples; each is (input, output, score)."""
        names = (loggers,) if isinstance(loggers, str) else tuple(loggers)
        if names not in self._tracking:
            self._tracking[names] = Tracking(*self._run_names, names)
        columns = ("input", "output", "score")
        rows = [dict(zip(columns, sample, strict=False)) for sample in samples]
        self._tracking[names].log_samples("val/generations", rows, step)
