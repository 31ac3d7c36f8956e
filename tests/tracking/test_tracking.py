from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hone.plugins import PluginError
from hone.tracking import RunFolder, RunInfo, Tracker, TrackerError, Tracking, read_metrics
from hone.tracking.contract import flatten, import_optional


class Notebook(Tracker):
    """A user's own tracker, named as 'module:Class'."""

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self.calls: list[tuple[Any, ...]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append(("log", dict(metrics), step))

    def log_samples(self, name: str, rows: Sequence[Mapping[str, Any]], step: int) -> None:
        self.calls.append(("samples", name, list(rows), step))

    def finish(self) -> None:
        self.calls.append(("finish",))


class Broken(Tracker):
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        raise ConnectionError("the cloud is down")


NOTEBOOK, BROKEN = f"{__file__}:Notebook", f"{__file__}:Broken"


def start(backends: Any, folder: Any) -> Tracking:
    return Tracking("project", "experiment", backends, {"a": {"b": 1}}, folder)


def test_every_tracker_gets_every_call(tmp_path: Path) -> None:
    tracking = start([NOTEBOOK], RunFolder(tmp_path))
    notebook = tracking.trackers[NOTEBOOK]
    tracking.log({"reward/mean": 0.5}, 3)
    tracking.log_samples("val", [{"prompt": "p"}], 3)
    tracking.finish()
    assert notebook.calls == [  # type: ignore[attr-defined]
        ("log", {"reward/mean": 0.5}, 3),
        ("samples", "val", [{"prompt": "p"}], 3),
        ("finish",),
    ]
    assert notebook.run.project_name == "project"
    assert notebook.run.config == {"a": {"b": 1}}


def test_finishing_twice_closes_once(tmp_path: Path) -> None:
    tracking = start(NOTEBOOK, tmp_path)
    notebook = tracking.trackers[NOTEBOOK]
    with tracking:
        pass
    tracking.finish()
    assert notebook.calls == [("finish",)]  # type: ignore[attr-defined]


def test_a_run_folder_always_gets_its_metrics(tmp_path: Path) -> None:
    tracking = start([NOTEBOOK], tmp_path)
    tracking.log({"a": 1}, 1)
    assert read_metrics(tmp_path) == [{"a": 1, "step": 1}]


@pytest.mark.parametrize("backends", ["file", ["jsonl"], ["file", "jsonl"]])
def test_file_is_verls_name_for_jsonl(backends: Any, tmp_path: Path) -> None:
    start(backends, tmp_path).log({"a": 1}, 1)
    assert len(read_metrics(tmp_path)) == 1


def test_a_second_process_appends_to_the_first(tmp_path: Path) -> None:
    start("jsonl", tmp_path).log({"a": 1}, 1)
    start("jsonl", tmp_path).log({"a": 2}, 2)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_failures_of_a_tracker_are_counted_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracking = start([BROKEN, NOTEBOOK], tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            tracking.log({"a": step}, step)
    assert tracking.failures == {BROKEN: 3}
    assert len([r for r in caplog.records if "the run continues" in r.message]) == 1
    assert "the cloud is down" in caplog.text
    rows = read_metrics(tmp_path)
    assert [row.get(f"tracking/failures/{BROKEN}") for row in rows] == [None, 1, 2]
    assert len(tracking.trackers[NOTEBOOK].calls) == 3  # type: ignore[attr-defined]


def test_a_failed_write_of_metrics_jsonl_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match="cannot append step 1"):
        start("jsonl", tmp_path).log({"a": 1}, 1)


def test_a_value_that_is_not_a_number_reaches_no_tracker(tmp_path: Path) -> None:
    tracking = start([NOTEBOOK], tmp_path)
    with pytest.raises(TrackerError, match="'a' is list"):
        tracking.log({"a": [1, 2]}, 1)
    assert tracking.trackers[NOTEBOOK].calls == []  # type: ignore[attr-defined]


def test_an_unknown_tracker_is_an_error_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"unknown tracker in trainer.logger 'wanbd'.*'wandb'"):
        start(["wanbd"], tmp_path)


def test_jsonl_without_a_folder_is_an_error() -> None:
    with pytest.raises(TrackerError, match="needs a run folder"):
        start("jsonl", None)


def test_a_missing_package_names_its_extra() -> None:
    with pytest.raises(TrackerError, match=r"pip install 'hone-rl\[wandb\]'"):
        import_optional("a_package_that_is_not_there", "wandb")


def test_flatten_joins_keys_and_keeps_lists() -> None:
    tree = {"a": {"b": 1, "c": {"d": [1, 2]}}, "e": None, "f": {}}
    assert dict(flatten(tree)) == {"a.b": 1, "a.c.d": [1, 2], "e": None, "f": {}}


def test_tracking_is_called_as_in_verl(tmp_path, capsys):
    with Tracking(
        project_name="p", experiment_name="e", default_backend=["console"], config={"a": 1}
    ) as tracking:
        tracking.log(data={"reward/mean": 0.5}, step=1)
    assert "0.5" in capsys.readouterr().out
    with Tracking("p", "e") as bare:
        assert list(bare.trackers) == ["console"]


def test_a_step_may_be_logged_to_named_backends_only(tmp_path, capsys):
    with Tracking("p", "e", "console", {}, tmp_path) as tracking:
        tracking.log({"reward/mean": 0.25}, 1, backend="file")
        with pytest.raises(TrackerError, match="no tracker 'wandb' in this run; it has jsonl, con"):
            tracking.log({"reward/mean": 0.25}, 2, backend=["wandb"])
    assert "0.25" not in capsys.readouterr().out
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]
