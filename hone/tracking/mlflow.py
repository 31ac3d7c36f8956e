"""The MLflow tracker; writes to $MLFLOW_TRACKING_URI or to `mlruns/` in the run folder."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence

from hone.tracking.contract import Number, RunInfo, Tracker, TrackerError, flatten, import_optional
from hone.tracking.run_folder import resumed_run_id, save_run_id
from hone.types import Row

# MLflow's limits
MAX_PARAMS_PER_CALL = 100
MAX_PARAM_CHARACTERS = 500


class MlflowTracker(Tracker):
    package = "mlflow"

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self.mlflow = import_optional("mlflow", "mlflow")
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            if run.folder is None:
                raise TrackerError("tracker 'mlflow' needs a run folder or $MLFLOW_TRACKING_URI")
            # MLflow 3 rejects file stores by default, and its slim package has no other store.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            self.mlflow.set_tracking_uri((run.folder / "mlruns").resolve().as_uri())
        self.mlflow.set_experiment(run.project_name)
        run_id = resumed_run_id(run, "mlflow")
        mlflow_run = self.mlflow.start_run(run_id=run_id, run_name=run.experiment_name)
        self.run_id: str = mlflow_run.info.run_id
        save_run_id(run, "mlflow", self.run_id)
        if run_id is None:  # MLflow accepts each parameter only once
            params = (
                (to_mlflow_name(key), str(value)[:MAX_PARAM_CHARACTERS])
                for key, value in flatten(run.config)
            )
            while chunk := dict(itertools.islice(params, MAX_PARAMS_PER_CALL)):
                self.mlflow.log_params(chunk, run_id=self.run_id)

    def log(self, metrics: Mapping[str, Number], step: int) -> None:
        values = {to_mlflow_name(key): float(value) for key, value in metrics.items()}
        self.mlflow.log_metrics(values, step=step, run_id=self.run_id)

    def log_samples(self, name: str, rows: Sequence[Row], step: int) -> None:
        text = json.dumps([dict(row) for row in rows], indent=1, default=str)
        self.mlflow.log_text(text, f"{to_mlflow_name(name)}/step_{step}.json", run_id=self.run_id)

    def finish(self) -> None:
        self.mlflow.end_run()


def to_mlflow_name(key: str) -> str:
    """Returns the key with `_at_` for `@`, and `_` for all characters but letters, digits and `_-. /`."""
    return re.sub(r"[^\w\-. /]", "_", key.replace("@", "_at_"), flags=re.ASCII)
