"""hone trains, fine-tunes and shows its config without hone/verl."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hone
from hone.tracking import read_metrics
from tests.trainer.around_fixtures import sft_settings
from tests.trainer.runs import Task

# The finder of an editable installation would find the missing package in the checkout.
NO_EDITABLE_FINDER = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
"""
NO_MODULE = "import hone; from hone.utils.reward_score import gsm8k"
PYTHON_DOOR = """
import hone
rows = [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(4)]
trained = hone.train("MODEL", rows, "arithmetic", steps=1, n=2, max_tokens=3, batch_size=2, logger=["jsonl"])
print([line["step"] for line in trained.metrics])
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package that has no hone/verl."""
    folder = tmp_path_factory.mktemp("clone")
    left_out = shutil.ignore_patterns("__pycache__", "verl")
    shutil.copytree(Path(hone.__file__).parent, folder / "hone", ignore=left_out)
    (folder / "sitecustomize.py").write_text(NO_EDITABLE_FINDER)
    return folder


def run(clone: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python at the copy, which thereby precedes the package of this interpreter."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=clone,
        env=os.environ | {"PYTHONPATH": str(clone)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def output(clone: Path, *arguments: str) -> str:
    done = run(clone, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_verls_paths_are_no_modules(clone: Path) -> None:
    done = run(clone, "-c", NO_MODULE)
    assert "ModuleNotFoundError: No module named 'hone.utils'" in done.stderr
    assert str(clone) in output(clone, "-c", "import hone; print(hone.__file__)")


def test_grpo_takes_a_step(clone: Path, task: Task) -> None:
    arguments = task.overrides(clone / "run", "trainer.total_training_steps=1")
    output(clone, "-m", "hone.trainer.main_ppo", *arguments)
    assert [line["training/global_step"] for line in read_metrics(clone / "run")] == [1]


def test_sft_takes_a_step(clone: Path, task: Task) -> None:
    settings = sft_settings(clone, task.model, "trainer.total_training_steps=1")
    folder = f"trainer.default_local_dir={clone / 'sft'}"
    output(clone, "-m", "hone.cli", "sft", *settings, folder)
    assert "train/loss" in read_metrics(clone / "sft")[-1]


def test_the_config_knows_hones_own_keys(clone: Path) -> None:
    config = "-m", "hone.cli", "config"
    shown = output(clone, *config, "show", "algorithm.adv_estimator=grpo")
    assert "adv_estimator: grpo" in shown
    assert "rollout.n" in output(clone, *config, "explain", "actor_rollout_ref.rollout.n")
    key_of_search_r1 = run(clone, *config, "show", "data.max_obs_length=3")
    assert "data has no key 'max_obs_length'" in key_of_search_r1.stderr


def test_a_python_program_trains(clone: Path, task: Task) -> None:
    program = PYTHON_DOOR.replace("MODEL", str(task.model))
    assert output(clone, "-c", program).endswith("[1]\n")
