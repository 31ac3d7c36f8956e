"""The seam of the room: `compose` knows verl's keys from the dialect that a program gives it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hone.config import ConfigError, compose
from hone.verl.dialect import VERL_KEYS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("data.max_obs_length=3", "data has no key 'max_obs_length'"),
        ("trainer.use_v1=true", "trainer has no key 'use_v1'"),
        ("actor_rollout_ref.rollout.skip_rollout=true", "has no key 'skip_rollout'"),
        ("hone.tree=pure", "the config has no key 'hone'"),
    ],
)
def test_without_a_dialect_only_hones_own_keys_are_known(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        compose([override])
    assert compose(["data.max_prompt_length=7"]).config.data.max_prompt_length == 7


def test_without_a_dialect_only_hones_own_configs_are_known() -> None:
    assert compose(config_name="sft_trainer").config.data.max_length
    with pytest.raises(ConfigError, match="there is no config 'dapo_trainer'"):
        compose(config_name="dapo_trainer")
    compose(config_name="dapo_trainer", dialect=VERL_KEYS)


def test_the_config_room_works_without_the_room_of_verl(tmp_path: Path) -> None:
    """The commands about configs run in a copy of the package that has no such room."""
    copy = tmp_path / "hone"
    shutil.copytree(ROOT / "hone", copy, ignore=shutil.ignore_patterns("__pycache__", "verl"))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hone.cli", "config", *words]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
        )

    shown = run("show", "data.train_batch_size=8")
    assert shown.returncode == 0, shown.stderr
    assert "train_batch_size: 8" in shown.stdout
    assert run("explain", "actor_rollout_ref.rollout.n").returncode == 0
    assert "data has no key 'max_obs_length'" in run("show", "data.max_obs_length=3").stderr
