"""A dry run prints what would run, and refuses a checkpoint that the disk cannot hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hone import cli
from hone.models.facts import model_facts
from hone.trainer.ppo import preview

from ..runs import Task
from .dry_runs import dry_run, no_models, problems_of  # noqa: F401


def test_a_dry_run_says_what_would_run_and_leaves_no_folder(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli.main(["train", "--dry-run", *task.overrides(tmp_path / "run", task.validated())]) == 0
    )
    output = capsys.readouterr().out
    assert "by grpo, 2 responses per prompt" in output
    assert "data.train_files: 24 prompts of" in output
    assert "2 steps of 4 prompts × 2 responses, 1 update per step" in output
    assert "GiB per process" in output
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_the_disk_cannot_hold_is_refused(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(preview.shutil, "disk_usage", lambda place: usage)
    (problem,) = problems_of(task, tmp_path, "trainer.save_freq=-1")
    sizes = re.search(r"a checkpoint takes about (\S+) MiB and \S+ has 0\.00 MiB free", problem)
    assert sizes is not None
    assert float(sizes.group(1)) > 0
    dry_run(task, tmp_path / "run", "trainer.save_freq=0")


def test_a_checkpoint_takes_what_its_parts_take(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = model_facts(str(task.model)).parameters
    assert parameters is not None
    usage = type("Usage", (), {"free": 10 * parameters})
    monkeypatch.setattr(preview.shutil, "disk_usage", lambda place: usage)
    save = ("trainer.save_freq=-1",)
    problems_of(task, tmp_path, *save)  # model, two moments and export: 16 bytes per parameter
    actor = "actor_rollout_ref.actor.checkpoint.save_contents"
    dry_run(task, tmp_path / "run", *save, f"{actor}=[model,hf_model]")
    dry_run(task, tmp_path / "run", *save, "actor_rollout_ref.model.lora_rank=4")
    prime = ("algorithm.adv_estimator=rloo", "reward_model.enable=true", "reward_model.type=prime")
    model = f"reward_model.model.path={task.model}"
    problems_of(task, tmp_path, *save, *prime, model, f"{actor}=[model,hf_model]")
