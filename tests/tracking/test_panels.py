"""PURE's panels in the report and in the wandb workspace."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hone import cli
from hone.tracking import RunFolder
from hone.tracking.panels import PURE_METRIC, SECTIONS
from hone.tracking.report import write_report

NAMES = [
    "Validation ACC", "Reward & Return", "High-Level Pattern", "Group ACC", "Stability", "Misc", "Loss",
]  # fmt: skip


def page(folder: Path, *lines: dict[str, float]) -> str:
    run = RunFolder(folder / "run")
    for step, line in enumerate(lines, 1):
        run.metrics.append(line, step)
    return write_report([run.path], folder / "report.html").read_text()


def charts(html: str) -> dict[str, list[str]]:
    """Returns group → the metrics of its charts."""
    groups = re.split(r"<details[^>]*><summary>", html)[1:]
    return {
        group.partition(" <span")[0].replace("&amp;", "&"): re.findall(
            r'data-name="([^"]+)"', group
        )
        for group in groups
        if "<figure" in group
    }


def test_the_sections_are_those_of_pures_workspace_and_every_metric_is_in_one_panel() -> None:
    assert [section.name for section in SECTIONS] == NAMES
    assert [section.name for section in SECTIONS if not section.is_open] == ["Loss"]
    metrics = [panel.metric for section in SECTIONS for panel in section.panels]
    assert len(set(metrics)) == len(metrics)


def test_the_report_of_a_run_with_pures_metrics_has_the_panels_in_sections(tmp_path: Path) -> None:
    line = {
        PURE_METRIC: 0.1,
        "instant_rewards/kl/mean": 0.2,
        "response_length/correct/mean": 7.0,
        "val-core/math500/acc/mean@1": 0.5,
        "val-core/other/acc/mean@1": 0.5,
        "actor/pg_loss": 0.3,
        "actor/lr": 1e-6,
    }
    later = {name: value * factor for factor, (name, value) in enumerate(line.items(), 2)}
    alarms = {"alarms/kl": 1.0, "alarms/raised": 1}
    html = page(tmp_path, line, line | alarms, later | {"alarms/raised": 0})
    groups = charts(html)
    assert groups["Validation ACC"] == ["val-core/math500/acc/mean@1", "val-core/other/acc/mean@1"]
    assert groups["Reward & Return"] == ["instant_rewards/kl/mean"]
    assert groups["High-Level Pattern"] == [PURE_METRIC, "response_length/correct/mean"]
    assert groups["Stability"] == ["alarms/raised"]
    assert groups["Loss"] == ["actor/pg_loss"]
    assert groups["actor"] == ["actor/lr"]
    assert "Group ACC" not in groups
    assert "alarm kl in 1 steps, first in step 2" in html
    assert re.search(r"<details open><summary>Stability", html)
    assert re.search(r"<details><summary>Loss", html)


def test_the_report_of_a_run_without_pures_metrics_has_no_such_section(tmp_path: Path) -> None:
    line = {"actor/pg_loss": 0.3, "reward/mean": 0.1, "timing_s/step": 1.0}
    assert not set(charts(page(tmp_path, line))) & set(NAMES)


def test_a_missing_package_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert cli.main(["wandb-workspace", "--project", "p", "--entity", "e"]) == 2
    assert "pip install 'hone-rl[wandb-workspace]'" in capsys.readouterr().err


def test_the_workspace_that_is_sent_has_the_panels_of_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb_workspaces")
    from wandb_workspaces.workspaces import internal

    sent: list[Any] = []

    def upsert(view: Any) -> Any:
        sent.append(json.loads(view.model_dump_json(by_alias=True, exclude_none=True)))
        return {"upsertView": {"view": {"name": "nw-abc-v", "id": "1"}}}

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(internal, "upsert_view2", upsert)
    arguments = ["wandb-workspace", "--project", "sums", "--entity", "me"]
    assert cli.main([*arguments, "--dry-run"]) == 0
    assert "Reward & Return: verifiable_reward, outcome_reward, kl" in capsys.readouterr().out
    assert not sent
    monkeypatch.setattr("wandb_workspaces.workspaces.Workspace.url", "https://there/sums")
    assert cli.main(arguments) == 0
    assert "wrote https://there/sums" in capsys.readouterr().out
    (view,) = sent
    assert (view["entity"], view["project"], view["displayName"]) == ("me", "sums", "PURE")
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    built = sections[: len(SECTIONS)]
    assert [s["name"] for s in built] == NAMES
    assert [s["isOpen"] for s in built] == [section.is_open for section in SECTIONS]
    for section, view_section in zip(SECTIONS, built, strict=True):
        plots = [panel["config"] for panel in view_section["panels"]]
        assert [p["chartTitle"] for p in plots] == [panel.title for panel in section.panels]
        for panel, plot in zip(section.panels, plots, strict=True):
            pattern = plot.get("metricRegex") if panel.is_pattern else plot["metrics"][0]
            assert pattern == panel.metric
            assert plot.get("yAxisMin") == panel.y_min
            assert (plot["smoothingType"], plot["smoothingWeight"]) == ("exponential", 0.8)
