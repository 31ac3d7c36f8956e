from __future__ import annotations

from pathlib import Path

import pytest

from hone.tracking import RunFolder
from hone.tracking.run_folder import (
    find_latest_ckpt_path,
    get_checkpoint_tracker_filename,
    step_files,
)


def test_names_inside_the_folder_are_fixed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    inside = {
        "config.yaml": run.config_file,
        "metrics.jsonl": run.metrics_file,
        "rollouts/step_3.parquet": (run.rollouts / "step_3.parquet"),
        "validation/step_3.parquet": run.validation_file(3),
        "global_step_3": run.checkpoint(3),
        "latest_checkpointed_iteration.txt": run.latest_file,
    }
    for name, path in inside.items():
        assert path == tmp_path / "run" / name
    assert not run.path.exists()


def test_config_and_origins_come_back(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert run.read_config() == {}
    assert run.read_config_origins() == {}
    config = {"trainer": {"logger": ["console"], "name": "größe", "steps": None}, "a": 1e-06}
    run.write_config(config, {"a": "command line"})
    assert run.read_config() == config
    assert run.read_config_origins() == {"a": "command line"}


def test_a_changed_config_keeps_the_earlier_ones(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for lr in (1, 1, 2, 3):
        run.write_config({"lr": lr})
    files = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert files == {
        "config.1.yaml": "lr: 1\n",
        "config.2.yaml": "lr: 2\n",
        "config.yaml": "lr: 3\n",
    }
    (tmp_path / "config.1.yaml").unlink()
    run.write_config({"lr": 4})
    assert {p.name for p in tmp_path.iterdir()} == {"config.2.yaml", "config.3.yaml", "config.yaml"}
    assert (tmp_path / "config.2.yaml").read_text() == "lr: 2\n"


def test_checkpoints_are_listed_by_number_not_by_name(tmp_path: Path) -> None:
    for name in ("global_step_10", "global_step_9", "global_step_x", ".global_step_11.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_12").write_text("a file")
    assert RunFolder(tmp_path).checkpoints() == [
        (9, tmp_path / "global_step_9"),
        (10, tmp_path / "global_step_10"),
    ]


def test_truncate_after_removes_metrics_and_samples_after_the_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (1, 2, 10):
        run.metrics.append({"a": step}, step)
        for file in ((run.rollouts / f"step_{step}.parquet"), run.validation_file(step)):
            file.parent.mkdir(exist_ok=True)
            file.write_text("rows")
        run.checkpoint(step).mkdir()
    (run.rollouts / ".step_11.parquet.5.tmp").write_text("half")
    (run.rollouts / "notes.txt").write_text("the user's")
    run.truncate_after(2)
    assert [row["step"] for row in run.metrics.rows()] == [1, 2]
    assert [step for step, _ in step_files(run.rollouts)] == [1, 2]
    assert [step for step, _ in step_files(run.validation)] == [1, 2]
    assert [step for step, _ in run.checkpoints()] == [1, 2, 10]
    assert sorted(p.name for p in run.rollouts.iterdir()) == [
        "notes.txt",
        "step_1.parquet",
        "step_2.parquet",
    ]


def test_ids_of_several_trackers_are_saved(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.run_ids_by_tracker().get("wandb") is None
    run.save_run_id("wandb", "abc")
    run.save_run_id("mlflow", "def")
    assert (run.run_ids_by_tracker().get("wandb"), run.run_ids_by_tracker().get("mlflow")) == (
        "abc",
        "def",
    )


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"[]", b'{"wandb": 5}', b""])
def test_invalid_files_are_kept_or_ignored(tmp_path: Path, content: bytes) -> None:
    run = RunFolder(tmp_path)
    run.config_file.write_bytes(content)
    run.trackers_file.write_bytes(content)
    run.write_config({"a": 1})
    assert (tmp_path / "config.1.yaml").read_bytes() == content
    assert run.run_ids_by_tracker().get("wandb") is None
    run.save_run_id("wandb", "x1")
    assert run.run_ids_by_tracker().get("wandb") == "x1"


def test_the_latest_checkpoint_is_found_under_verls_name(tmp_path: Path) -> None:
    assert find_latest_ckpt_path(None) is None
    assert find_latest_ckpt_path(str(tmp_path)) is None
    Path(get_checkpoint_tracker_filename(str(tmp_path))).write_text("20", encoding="utf-8")
    assert find_latest_ckpt_path(str(tmp_path)) is None
    (tmp_path / "global_step_20").mkdir()
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_20")


def test_a_run_folder_may_lie_below_the_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = RunFolder("~/run")
    assert run.path == tmp_path / "run"
    run.checkpoint(3).mkdir(parents=True)
    run.latest_file.write_text("3")
    assert find_latest_ckpt_path("~/run") == str(run.checkpoint(3))
