"""`global_profiler`: listed steps leave a trace; nsys is started where it is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hone import cli
from hone.config.trainer import GlobalProfilerConfig
from hone.controller import profiling
from hone.trainer.ppo import profiling as steps

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


def test_a_run_starts_again_under_nsys(tmp_path: Path) -> None:
    """The stand-in for nsys shows what it was given and goes on with the program."""
    nsys = tmp_path / "nsys"
    nsys.write_text('#!/bin/sh\necho "$@"\n')
    nsys.chmod(0o755)
    program = (
        "import sys\nfrom hone.config.trainer import GlobalProfilerConfig as C\n"
        "from hone.trainer.ppo.profiling import start_again_under_nsys as again\n"
        f"again(C('nsys', (1,), {str(tmp_path / 'out')!r}, {{'trace': 'cuda'}}), sys.argv[1:])\n"
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", program, "a=1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert words[0] == "profile"
    assert {"--capture-range=cudaProfilerApi", "--trace=cuda"} <= set(words)
    assert words[-1] == "a=1"


@pytest.mark.parametrize(("path", "told"), [("", "nsys is not on PATH"), (None, "start Python")])
def test_without_nsys_or_in_a_callers_process_a_line_says_that_nothing_is_recorded(
    path: str | None,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(steps.shutil, "which", lambda _: None if path == "" else "/bin/nsys")
    steps.start_again_under_nsys(GlobalProfilerConfig("nsys", (1,)), ["not", "its", "arguments"])
    assert told in capsys.readouterr().out
