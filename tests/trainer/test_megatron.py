"""`main_ppo --config-name=ppo_megatron_trainer` under Ray: actor, critic and reference on several ranks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from .runs import Run, Task, start

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ACTOR = "actor_rollout_ref.actor"
OF_THE_LAYOUT = ("timing_", "perf/", "traffic/", "global_seqlen/", "system/")


def train(task: Task, folder: Path, *overrides: str) -> Run:
    """Two steps on two ranks, in a process of its own."""
    process = start(
        [
            "--config-name=ppo_megatron_trainer",
            *task.overrides(folder, *overrides),
            "actor_rollout_ref.model.external_lib=tests.engine.megatron_on_cpu",
            "trainer.controller=ray",
            "trainer.n_gpus_per_node=2",
        ]
    )
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]
    return Run(folder)


def test_grpo_steps_on_two_tensor_parallel_ranks(task: Task, tmp_path: Path) -> None:
    size = f"{ACTOR}.megatron.tensor_model_parallel_size=2"
    kl = f"{ACTOR}.use_kl_loss=true"
    run = train(task, tmp_path, size, kl, f"{ACTOR}.ppo_mini_batch_size=2", "trainer.save_freq=2")
    assert len(run.steps) == 2
    for metrics in run.steps:
        assert metrics["rollout_corr/log_prob_abs_diff_max"] < 1e-5
        assert metrics["actor/grad_norm"] > 0
    assert (run.checkpoint(2) / "actor" / "huggingface" / "config.json").exists()


def test_ppo_with_a_critic_on_two_pipeline_stages_gives_the_metrics_of_one_rank(
    task: Task, tmp_path: Path
) -> None:
    """Actor, critic and reference are Megatron's; trajectories are recorded."""
    settings = [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.rollout.name=tests.trainer.recorded:Recorded",
        "actor_rollout_ref.rollout.free_cache_engine=false",
        *(f"{role}.optim.optimizer=SGD" for role in (ACTOR, "critic")),
    ]
    size = f"{ACTOR}.megatron.pipeline_model_parallel_size=2"
    run = train(task, tmp_path / "megatron", *settings, size)
    one = Run(tmp_path / "one").train(task.overrides(tmp_path / "one", *settings))
    assert len(run.steps) == len(one.steps) == 2
    for found, expected in zip(run.steps, one.steps, strict=True):
        assert expected["critic/grad_norm"] > 0
        for name, value in expected.items():
            if not name.startswith(OF_THE_LAYOUT) and not math.isnan(value):
                assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
