"""The jsonl tracker: every step's metrics to `metrics.jsonl` in the run folder.

It is the record other tools read (resume, curves, reports), so a failed write stops the run.
"""

from __future__ import annotations

from collections.abc import Mapping

from hone.tracking.contract import Number, RunInfo, Tracker, TrackerError
from hone.tracking.lock import require_lock
from hone.tracking.metrics_file import MetricsFile


class JsonlTracker(Tracker):
    is_the_record = True

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        if run.folder is None:
            raise TrackerError("tracker 'jsonl' needs a run folder to write metrics.jsonl to")
        self.file = MetricsFile(run.folder / "metrics.jsonl")

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        require_lock(self.file.path.parent)
        self.file.append(metrics, step)
