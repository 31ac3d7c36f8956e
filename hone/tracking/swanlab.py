"""The SwanLab tracker.

Obeys swanlab's own variables (SWANLAB_MODE=offline or local keeps all in the run folder).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from hone.tracking.contract import Number, RunInfo, Tracker, require
from hone.tracking.run_folder import RunFolder
from hone.types import Row


class SwanlabTracker(Tracker):
    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self.swanlab = require("swanlab", "swanlab")
        folder = RunFolder(run.folder) if run.folder is not None else None
        known = folder.tracker_id("swanlab") if folder and run.resumed_from is not None else None
        options: dict[str, str] = {"id": known, "resume": "allow"} if known else {}
        if run.folder is not None:
            logs = run.folder / "swanlab"
            logs.mkdir(parents=True, exist_ok=True)
            options["logdir"] = str(logs)
        if mode := os.environ.get("SWANLAB_MODE"):
            options["mode"] = mode
        self.session = self.swanlab.init(
            project=run.project_name,
            experiment_name=run.experiment_name,
            config=dict(run.config),
            **options,
        )
        run_id = getattr(self.session, "id", None)
        if folder is not None and isinstance(run_id, str):
            folder.keep_tracker_id("swanlab", run_id)

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        self.swanlab.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        texts = [self.swanlab.Text(json.dumps(dict(row), indent=1, default=str)) for row in rows]
        if texts:
            self.swanlab.log({name: texts}, step=step)

    def finish(self) -> None:
        self.swanlab.finish()
