"""`global_profiler`: listed steps leave a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone import cli
from hone.controller import profiling

from ..runs import Task


def test_each_listed_step_leaves_a_trace_in_the_run_folder(task: Task, tmp_path: Path) -> None:
    overrides = task.overrides(tmp_path / "run", "trainer.profile_steps=[2]")
    assert cli.main(["train", *overrides]) == 0
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "step_2-actor+rollout-rank_0.json.gz"


def test_a_step_that_fails_stops_the_recording(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hone.trainer.ppo.trainer.PPOTrainer.update", fails)
    overrides = task.overrides(tmp_path / "run", "global_profiler.steps=[1]")
    assert cli.main(["train", *overrides]) == 2
    assert not profiling._running
    assert not (tmp_path / "run" / "profile").exists()
