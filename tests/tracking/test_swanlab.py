from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hone.tracking import RunFolder, TrackerError, Tracking


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake module that records its calls."""
    module: Any = types.ModuleType("swanlab")
    module.inits, module.logged, module.finished = [], [], 0

    def init(**options: Any) -> Any:
        module.inits.append(options)
        return types.SimpleNamespace(id="abc")

    def finish() -> None:
        module.finished += 1

    module.init, module.finish = init, finish
    module.log = lambda data, step: module.logged.append((data, step))
    module.Text = lambda text: ("text", json.loads(text))
    monkeypatch.setitem(sys.modules, "swanlab", module)
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    return module


def test_metrics_and_samples_are_logged_and_a_resumed_run_keeps_its_id(
    fake: Any, tmp_path: Path
) -> None:
    with Tracking("project", "experiment", "swanlab", {"a": 1}, tmp_path) as tracking:
        tracking.log({"reward/mean": 0.5}, 3)
        tracking.log_samples("val", [{"prompt": "p"}], 3)
        tracking.log_samples("val", [], 4)
    Tracking("project", "experiment", "swanlab", {}, tmp_path, resumed_from=3).finish()
    assert fake.logged == [({"reward/mean": 0.5}, 3), ({"val": [("text", {"prompt": "p"})]}, 3)]
    first, second = fake.inits
    assert first["project"] == "project"
    assert first["experiment_name"] == "experiment"
    assert first["mode"] == "offline"
    assert Path(first["logdir"]) == tmp_path / "swanlab"
    assert "id" not in first
    assert (second["id"], second["resume"]) == ("abc", "allow")
    assert fake.finished == 2
    assert RunFolder(tmp_path).run_ids_by_tracker().get("swanlab") == "abc"


def test_without_the_package_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "swanlab", None)
    with pytest.raises(TrackerError, match=r"pip install 'hone-rl\[swanlab\]'"):
        Tracking("p", "e", "swanlab", {}, tmp_path)
