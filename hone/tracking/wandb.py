"""The Weights & Biases tracker; a resumed run keeps the id of the first run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hone.tracking.contract import Number, RunInfo, Tracker, import_optional
from hone.tracking.run_folder import resumed_run_id, save_run_id
from hone.types import Row


class WandbTracker(Tracker):
    package = "wandb"

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self.wandb = import_optional("wandb", "wandb")
        if run.folder is not None:
            run.folder.mkdir(parents=True, exist_ok=True)
        run_id = resumed_run_id(run, "wandb")
        self.session = self.wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            config=dict(run.config),
            dir=str(run.folder) if run.folder is not None else None,
            id=run_id,
            resume="allow" if run_id else None,
        )
        save_run_id(run, "wandb", self.session.id)

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        self.session.log(dict(metrics), step=step)

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        values = [[row.get(column) for column in columns] for row in rows]
        plain_types = (str, int, float, type(None))
        data = [[v if isinstance(v, plain_types) else str(v) for v in row] for row in values]
        self.session.log({name: self.wandb.Table(columns=columns, data=data)}, step=step)

    def finish(self) -> None:
        self.session.finish()
