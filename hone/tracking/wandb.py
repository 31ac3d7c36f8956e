"""The Weights & Biases tracker, and `hone wandb-workspace`: a workspace with the panels of `panels.py`.

A resumed run keeps the id of the first run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hone.tracking.contract import Number, RunInfo, Tracker, TrackerError, import_optional
from hone.tracking.panels import SECTIONS, Panel
from hone.tracking.run_folder import resumed_run_id, save_run_id
from hone.types import JsonValue, Row

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import Workspace

SMOOTHING = 0.8
MAX_RUNS = 20


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
        plain_types = (str, int, float, type(None))
        cells: list[list[JsonValue]] = []
        for row in rows:
            values = [row.get(column) for column in columns]
            cells.append([v if isinstance(v, plain_types) else str(v) for v in values])
        self.session.log({name: self.wandb.Table(columns=columns, data=cells)}, step=step)

    def finish(self) -> None:
        self.session.finish()


def build_workspace(project: str, entity: str, name: str) -> Workspace:
    """Returns the workspace; nothing is sent before its `save` is called."""
    try:
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise TrackerError(
            f"hone wandb-workspace needs the package wandb-workspaces ({error}): "
            "pip install 'hone-rl[wandb-workspace]'"
        ) from error
    sections = []
    for section in SECTIONS:
        plots = [_plot(panel) for panel in section.panels]
        sections.append(
            workspaces.Section(name=section.name, panels=plots, is_open=section.is_open)
        )
    settings = workspaces.WorkspaceSettings(max_runs=MAX_RUNS)
    return workspaces.Workspace(
        entity=entity, project=project, name=name, sections=sections, settings=settings
    )


def _plot(panel: Panel) -> LinePlot:
    from wandb_workspaces.reports.v2 import LinePlot

    return LinePlot(
        title=panel.title,
        y=[] if panel.is_pattern else [panel.metric],
        metric_regex=panel.metric if panel.is_pattern else None,
        range_y=(panel.y_min, None),
        custom_expressions=[panel.expression] if panel.expression else None,
        smoothing_type="exponential",
        smoothing_factor=SMOOTHING,
        max_runs_to_show=MAX_RUNS,
    )
