"""`hone wandb-workspace`: a Weights & Biases workspace with the panels of `panels.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.tracking.contract import TrackerError
from hone.tracking.panels import SECTIONS, Panel

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import Workspace

SMOOTHING = 0.8
MAX_RUNS = 20


def build_workspace(project: str, entity: str, name: str) -> Workspace:
    """Returns the workspace; nothing is sent before its `save` is called."""
    try:
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise TrackerError(
            f"hone wandb-workspace needs the package wandb-workspaces ({error}): "
            "pip install 'hone-rl[wandb-workspace]'"
        ) from error
    sections = [
        workspaces.Section(
            name=section.name,
            panels=[_plot(panel) for panel in section.panels],
            is_open=section.is_open,
        )
        for section in SECTIONS
    ]
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
