from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hone.cli import main
from hone.tracking import RunFolder
from hone.tracking.lock import lock_folder
from hone.trainer.command_line import ERROR_LOG
from hone.trainer.run_list import MAX_DEPTH, age, find_runs, run_state


def make_run(path: Path, *scores: float, total_steps: int | None = None) -> RunFolder:
    run = RunFolder(path)
    run.write_config({"trainer": {"total_training_steps": total_steps}})
    for step, score in enumerate(scores, 1):
        run.metrics.append({"reward/mean": score, "val-core/sums/acc/mean@1": score / 2}, step)
    return run


def test_the_list_has_state_step_best_and_age_of_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs" / "done", 0.25, 1.0, 0.5, total_steps=3)
    old = make_run(tmp_path / "checkpoints" / "sums" / "left", 0.5, total_steps=8)
    two_days_ago = time.time() - 2 * 86400
    os.utime(old.metrics_file, (two_days_ago, two_days_ago))
    monkeypatch.chdir(tmp_path)
    assert main(["runs"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "mean@1" in line]
    best = ["(val-core/sums/acc/mean@1)"]
    assert [line[:2] for line in lines] == [
        ["runs/done", "finished"],
        ["checkpoints/sums/left", "stopped"],
    ]
    assert lines[0][2:7] == ["3/3", "0.5", "at", "2", *best]
    assert lines[1][2:] == ["1/8", "0.25", "at", "1", *best, "2", "d", "ago"]


def test_a_folder_without_a_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(tmp_path)]) == 0
    assert f"no run below {tmp_path}" in capsys.readouterr().out


def test_a_run_is_running_while_a_process_holds_its_lock(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 0.5)
    with lock_folder(run.path):
        assert run_state(run.path).state == "running"
    assert run_state(run.path).state == "stopped"


def test_a_killed_run_is_stopped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 0.5)
    program = (
        "import os, sys\nfrom hone.tracking.lock import lock_folder\n"
        "lock_folder(sys.argv[1]).__enter__()\nos.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(run.path)], timeout=280)
    assert (run.path / ".lock").exists()
    assert run_state(run.path).state == "stopped"


def test_a_holder_on_another_machine_counts_while_it_touches_the_lock(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 0.5)
    lock = run.path / ".lock"
    lock.write_text(json.dumps({"token": "a1", "host": "elsewhere", "pid": 7}))
    assert run_state(run.path).state == "running"
    os.utime(lock, (time.time() - 3600,) * 2)
    assert run_state(run.path).state == "stopped"


def test_a_run_with_an_error_after_its_last_step_has_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 0.5)
    (run.path / ERROR_LOG).write_text("Traceback")
    assert run_state(run.path).state == "failed"
    later = time.time() + 60
    os.utime(run.metrics_file, (later, later))  # it was resumed, and stopped without an error
    assert run_state(run.path).state == "stopped"


def test_a_run_that_cannot_be_read_is_listed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.metrics_file.write_text("not json\n")
    run.config_file.write_text("a: [1, 2")
    state = run_state(run.path)
    assert (state.step, state.total_steps, state.best_text) == (None, None, "–")


def test_runs_are_found_below_a_folder_but_not_inside_runs_and_not_too_deep(tmp_path: Path) -> None:
    at_limit = tmp_path.joinpath(*"abcd")
    for path in (tmp_path / "b" / "run", at_limit, at_limit / "deep", tmp_path / ".venv" / "run"):
        make_run(path, 0.5)
    make_run(tmp_path / "b" / "run" / "inner", 0.5)
    assert MAX_DEPTH == 4
    assert list(find_runs(tmp_path)) == [at_limit, tmp_path / "b" / "run"]
    assert list(find_runs(at_limit)) == [at_limit]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.9, "59 s"), (60, "1 min"), (7300, "2 h"), (90000, "1 d")],
)
def test_an_age_has_its_largest_unit(seconds: float, text: str) -> None:
    assert age(seconds) == text
