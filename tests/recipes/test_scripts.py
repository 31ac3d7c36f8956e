"""The recipes' scripts wait for every run that they start, also for one that has ended before."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
STAND_IN = """#!/bin/bash
# Stands for python: notes its arguments, and fails if they contain $FAILS.
echo "$*" >> "$LOG"
[[ $* != *"$FAILS"* ]] || exit 3
"""
EACH_ENDS_FIRST = """
trap 'while [ -n "$(jobs -rp)" ]; do sleep 0.01; done; /bin/true' DEBUG
"""
"""Before each command of the script itself, all its background jobs have ended."""


def start(
    tmp_path: Path, script: str, arguments: list[str], fails: str, **settings: str
) -> tuple[int, str]:
    """The script's status and the commands that it has run."""
    python, log, prelude = (tmp_path / name for name in ("python", "log", "prelude"))
    python.write_text(STAND_IN)
    python.chmod(0o755)
    prelude.write_text(EACH_ENDS_FIRST)
    environment = {"PYTHON": str(python), "LOG": str(log), "FAILS": fails} | settings
    done = subprocess.run(
        ["bash", str(RECIPES / script), *arguments],
        env=os.environ | environment | {"BASH_ENV": str(prelude)},
        capture_output=True,
        timeout=120,
    )
    return done.returncode, log.read_text()


@pytest.mark.parametrize(
    ("fails", "status", "last"),
    [("/sft.parquet", 1, "/untrained_tools"), ("", 0, "results.py"), ("/grpo-1", 1, "/tools-1")],
)
def test_a_run_of_gsm8k_that_fails_at_once_ends_the_script(
    tmp_path: Path, fails: str, status: int, last: str
) -> None:
    fails = fails or "no such run"
    code, log = start(tmp_path, "gsm8k/run.sh", ["M", "D", str(tmp_path / "out")], fails)
    assert (code, last in log.splitlines()[-1]) == (status, True), log


@pytest.mark.parametrize(("fails", "status"), [("seed=1 ", 1), ("no such run", 0)])
def test_a_run_of_tinyzero_that_fails_stops_no_other_and_is_told(
    tmp_path: Path, fails: str, status: int
) -> None:
    settings = {"SEEDS": "1 2", "TOGETHER": "2", "ALGORITHMS": "grpo"}
    arguments = [str(tmp_path / "out"), "--small"]
    code, log = start(tmp_path, "tinyzero/scripts/reproduce.sh", arguments, fails, **settings)
    assert code == status, log
    assert "trainer.seed=2 " in log
    assert ("curves.py" in log) == (status == 0)
