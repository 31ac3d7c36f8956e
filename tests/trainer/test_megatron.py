"""`main_ppo --config-name=ppo_megatron_trainer` under Ray: actor, critic and reference on two ranks."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from .runs import Run, Task, make_mixture

pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ACTOR = "actor_rollout_ref.actor"
OF_THE_LAYOUT = ("timing_", "perf/", "traffic/", "global_seqlen/", "system/")
RECORDED = [
    "actor_rollout_ref.rollout.name=tests.trainer.recorded:Recorded",
    "actor_rollout_ref.rollout.free_cache_engine=false",
    *(f"{role}.optim.optimizer=SGD" for role in (ACTOR, "critic")),
]
CRITIC = [*RECORDED, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]
EXPERTS = [
    *RECORDED,
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.router_replay.mode=R2",
]
MIXTURE = "actor_rollout_ref.model.path={mixture}"
RUNS = {
    "tensor": [
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        "trainer.save_freq=2",
    ],
    "pipeline": [*CRITIC, f"{ACTOR}.megatron.pipeline_model_parallel_size=2"],
    "experts": [*EXPERTS, MIXTURE, f"{ACTOR}.megatron.expert_model_parallel_size=2"],
    "parts of experts": [*EXPERTS, MIXTURE, f"{ACTOR}.megatron.expert_tensor_parallel_size=2"],
}
"""Two steps each, with two data-parallel ranks where nothing else splits the ranks."""
PROGRAM = """
import json, sys
from hone.controller.ray_start import start_ray
from hone.trainer.main_ppo import main
start_ray({"num_cpus": 2, "log_to_driver": False, "object_store_memory": 200_000_000})
for arguments in json.loads(sys.argv[1]):
    main(arguments)
"""
"""The commands one after the other on one cluster, in a process of their own: it imports a patch of torch."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="module")
def runs(task: Task, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("megatron")
    commands = [
        [
            "--config-name=ppo_megatron_trainer",
            *task.overrides(folder / name, *(x.format(mixture=mixture) for x in overrides)),
            "actor_rollout_ref.model.external_lib=tests.engine.megatron_on_cpu",
            "trainer.controller=ray",
            "trainer.n_gpus_per_node=2",
        ]
        for name, overrides in RUNS.items()
    ]
    done = subprocess.run(  # ends the process if the test ends first
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return {name: Run(folder / name) for name in RUNS}


def assert_same_metrics(run: Run, one: Run) -> None:
    assert len(run.steps) == len(one.steps) == 2
    for result, expected in zip(run.steps, one.steps, strict=True):
        assert expected["actor/grad_norm"] > 0
        for name, value in expected.items():
            if not name.startswith(OF_THE_LAYOUT) and not math.isnan(value):
                assert result[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_grpo_steps_on_two_tensor_parallel_ranks(runs: dict[str, Run]) -> None:
    run = runs["tensor"]
    assert len(run.steps) == 2
    for metrics in run.steps:
        assert metrics["rollout_corr/log_prob_abs_diff_max"] < 1e-5
        assert metrics["actor/grad_norm"] > 0
    assert (run.checkpoint(2) / "actor" / "huggingface" / "config.json").exists()


def test_ppo_with_a_critic_on_two_pipeline_stages_gives_the_metrics_of_one_rank(
    runs: dict[str, Run], task: Task, tmp_path: Path
) -> None:
    """Actor, critic and reference are Megatron's; trajectories are recorded."""
    one = Run(tmp_path).train(task.overrides(tmp_path, *CRITIC))
    assert one.steps[0]["critic/grad_norm"] > 0
    assert_same_metrics(runs["pipeline"], one)


@pytest.fixture(scope="module")
def one_rank_of_experts(task: Task, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("one")
    model = MIXTURE.format(mixture=mixture)
    return Run(folder).train(task.overrides(folder, *EXPERTS, model))


@pytest.mark.parametrize("name", ["experts", "parts of experts"])
def test_grpo_with_split_experts_gives_the_metrics_of_one_rank(
    runs: dict[str, Run], one_rank_of_experts: Run, name: str
) -> None:
    """Whole experts on each rank, and a part of every expert on each rank of two data-parallel ones; the
    update replays the experts of the log-prob pass."""
    assert "actor/routing_agreement" in one_rank_of_experts.steps[0]
    assert_same_metrics(runs[name], one_rank_of_experts)
