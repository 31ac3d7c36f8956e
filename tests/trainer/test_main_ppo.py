"""`hone train` before its loop: nsys, and the run folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hone.config import ConfigError, PPOTrainerConfig
from hone.config.trainer import GlobalProfilerConfig
from hone.trainer import main_ppo
from hone.verl.dialect import load_config


def test_a_program_starts_again_under_nsys(tmp_path: Path) -> None:
    """The stand-in for nsys shows what it was given."""
    (tmp_path / "nsys").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "nsys").chmod(0o755)
    program = (
        "from hone.config.trainer import GlobalProfilerConfig as C\n"
        "from hone.trainer.command_line import run_program\n"
        "from hone.trainer.main_ppo import restart_under_nsys as again\n"
        f"config = C('nsys', (1,), {str(tmp_path / 'out')!r}, {{'trace': 'cuda'}})\n"
        "run_program(lambda: again(config))\n"
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", program, "a=1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    assert words[0] == "profile"
    assert {"--capture-range=cudaProfilerApi", "--trace=cuda"} <= set(words)
    assert words[-1] == "a=1"


@pytest.mark.parametrize(
    ("nsys_path", "message"), [(None, "nsys is not on PATH"), ("x", "start your Python program")]
)
def test_without_nsys_or_in_a_callers_process_a_line_says_that_nothing_is_recorded(
    nsys_path: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(main_ppo.shutil, "which", lambda _: nsys_path)
    main_ppo.restart_under_nsys(GlobalProfilerConfig("nsys", (1,)))
    assert message in capsys.readouterr().out


def test_a_run_folder_below_the_home_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str] = []

    def prepare(config: PPOTrainerConfig, compute_score: None) -> None:
        folders.append(config.trainer.default_local_dir)
        raise ConfigError("that is enough")

    monkeypatch.setattr("hone.trainer.ppo.preflight.prepare", prepare)
    monkeypatch.setenv("HOME", str(tmp_path))
    config: Any = load_config(["trainer.default_local_dir=~/run"])
    with pytest.raises(ConfigError, match="that is enough"):
        main_ppo.run(config)
    assert folders == [f"{tmp_path}/run"]
