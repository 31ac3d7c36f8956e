from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hone.tracking import RunFolder, TrackerError, Tracking


class FakeSession:
    def __init__(self, run_id: str) -> None:
        self.id, self.logged, self.finished = run_id, [], False  # type: ignore[var-annotated]

    def log(self, data: dict[str, Any], step: int) -> None:
        self.logged.append((data, step))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake module that records its calls."""
    module: Any = types.ModuleType("wandb")
    module.inits = []

    def init(**options: Any) -> FakeSession:
        module.inits.append(options)
        module.session = FakeSession(options["id"] or "fresh")
        return module.session

    module.init = init
    module.Table = lambda columns, data: ("table", columns, data)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_metrics_and_tables_are_logged_at_their_step(fake: Any, tmp_path: Path) -> None:
    with Tracking("project", "experiment", "wandb", {"a": 1}, tmp_path) as tracking:
        tracking.log({"reward/mean": 0.5}, 3)
        tracking.log_samples(
            "val", [{"prompt": "p", "score": 1.0}, {"prompt": "q", "tags": [1]}], 3
        )
    (options,) = fake.inits
    assert options["project"] == "project"
    assert options["name"] == "experiment"
    assert options["config"] == {"a": 1}
    assert fake.session.logged == [
        ({"reward/mean": 0.5}, 3),
        (
            {
                "val": (
                    "table",
                    ["prompt", "score", "tags"],
                    [["p", 1.0, None], ["q", None, "[1]"]],
                )
            },
            3,
        ),
    ]
    assert fake.session.finished
    assert tracking.failures == {}


def test_a_resumed_run_continues_under_its_id_and_a_fresh_one_does_not(
    fake: Any, tmp_path: Path
) -> None:
    Tracking("p", "e", "wandb", {}, tmp_path).finish()
    assert RunFolder(tmp_path).run_ids_by_tracker().get("wandb") == "fresh"
    Tracking("p", "e", "wandb", {}, tmp_path, resumed_from=5).finish()
    Tracking("p", "e", "wandb", {}, tmp_path).finish()
    assert [(o["id"], o["resume"]) for o in fake.inits] == [
        (None, None),
        ("fresh", "allow"),
        (None, None),
    ]


def test_without_the_package_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrackerError, match=r"pip install 'hone-rl\[wandb\]'"):
        Tracking("p", "e", "wandb", {}, tmp_path)


def test_offline_mode_keeps_everything_in_the_run_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with Tracking("p", "e", "wandb", {"a": {"b": 1}}, tmp_path) as tracking:
        tracking.log({"reward/mean": 0.5}, 1)
        tracking.log_samples("val", [{"prompt": "p", "score": 1.0}], 1)
    assert tracking.failures == {}
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
