"""A run that needs other devices than this machine has is refused before Ray starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hone import cli
from hone.controller import ray_start
from hone.trainer.ppo.device_check import device_problem
from hone.verl.dialect import load_config

from ..runs import Task
from .dry_runs import no_models, problems_of  # noqa: F401


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two CPU cores, no GPU, and no Ray cluster: another test's may run in this process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(ray_start.ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_cuda_without_a_gpu_is_one_sentence_in_a_dry_run(task: Task, tmp_path: Path) -> None:
    (problem,) = problems_of(task, tmp_path, "trainer.device=cuda")
    assert problem.startswith("trainer.device=cuda, but torch sees no CUDA device here")


def test_more_processes_than_cores_or_gpus_are_refused(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eight = ("trainer.n_gpus_per_node=8", "trainer.device=auto")
    (problem,) = problems_of(task, tmp_path, *eight)
    assert "needs 8 CPU processes, and this machine has 0 GPUs and 2 CPU cores" in problem
    with_gpus(monkeypatch, 4)
    assert "needs 8 GPUs, and this machine has 4" in str(device_problem(load_config(list(eight))))
    assert device_problem(load_config(["trainer.n_gpus_per_node=4"])) is None
    pools = ["trainer.n_gpus_per_node=4", "actor_rollout_ref.hybrid_engine=false",
             "actor_rollout_ref.rollout.nnodes=1"]  # fmt: skip
    assert "needs 8 GPUs" in str(device_problem(load_config(pools)))


def test_the_devices_of_a_cluster_are_left_to_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(["trainer.n_gpus_per_node=8", "trainer.nnodes=2", "trainer.device=cuda"])
    assert device_problem(config) is not None
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert device_problem(config) is None


def test_processes_without_gpus_are_named(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = task.overrides(tmp_path / "run", "trainer.n_gpus_per_node=2", "trainer.device=auto")
    assert cli.main(["train", "--dry-run", *arguments]) == 0
    output = capsys.readouterr().out
    assert output.count("torch sees no GPU here: 2 CPU processes train") == 1
