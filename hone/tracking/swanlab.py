"""The SwanLab tracker; SWANLAB_MODE=offline or local keeps all data in the run folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from hone.tracking.contract import Number, RunInfo, Tracker, import_optional
from hone.tracking.run_folder import resumed_run_id, save_run_id
from hone.types import Row


class SwanlabTracker(Tracker):
    package = "swanlab"

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self.swanlab = import_optional("swanlab", "swanlab")
        options: dict[str, str] = {}
        if earlier_id := resumed_run_id(run, "swanlab"):
            options |= {"id": earlier_id, "resume": "allow"}
        if run.folder is not None:
            options["logdir"] = str(run.folder / "swanlab")
            (run.folder / "swanlab").mkdir(parents=True, exist_ok=True)
        if mode := os.environ.get("SWANLAB_MODE"):
            options["mode"] = mode
        session = self.swanlab.init(
            project=run.project_name,
            experiment_name=run.experiment_name,
            config=dict(run.config),
            **options,
        )
        run_id = getattr(session, "id", None)
        if isinstance(run_id, str):
            save_run_id(run, "swanlab", run_id)

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        self.swanlab.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        texts = [self.swanlab.Text(json.dumps(dict(row), indent=1, default=str)) for row in rows]
        if texts:
            self.swanlab.log({name: texts}, step=step)

    def finish(self) -> None:
        self.swanlab.finish()
