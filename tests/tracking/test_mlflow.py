from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hone.tracking import RunFolder, TrackerError, Tracking
from hone.tracking.mlflow import to_mlflow_name


def test_characters_that_mlflow_rejects_are_replaced() -> None:
    assert to_mlflow_name("val-core/x/acc/mean@1") == "val-core/x/acc/mean_at_1"
    assert to_mlflow_name("a:b(c)é") == "a_b_c__"


def test_without_the_package_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(TrackerError, match=r"pip install 'hone-rl\[mlflow\]'"):
        Tracking("p", "e", "mlflow", {}, tmp_path)


def test_a_resumed_run_continues_the_same_mlflow_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    config = {"a": {"b": "x" * 9000}, "many": {f"k{i}": i for i in range(250)}}
    with Tracking("p", "e", "mlflow", config, tmp_path) as tracking:
        tracking.log({"val-core/x/acc/mean@1": 0.5}, 1)
        tracking.log_samples("val", [{"prompt": "p"}], 1)
    with Tracking("p", "e", "mlflow", config, tmp_path, resumed_from=1) as resumed:
        resumed.log({"val-core/x/acc/mean@1": 0.75}, 2)
    assert (tracking.failures, resumed.failures) == ({}, {})
    run_id = RunFolder(tmp_path).run_ids_by_tracker().get("mlflow")
    assert run_id is not None
    (folder,) = (tmp_path / "mlruns").glob(f"*/{run_id}")
    values = (folder / "metrics" / "val-core" / "x" / "acc" / "mean_at_1").read_text().split("\n")
    assert [line.split()[1:] for line in values if line] == [["0.5", "1"], ["0.75", "2"]]
    assert len(list((folder / "params").iterdir())) == 251
    assert json.loads((folder / "artifacts" / "val" / "step_1.json").read_text()) == [
        {"prompt": "p"}
    ]
