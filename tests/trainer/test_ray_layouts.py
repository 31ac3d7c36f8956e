"""GRPO under Ray in layouts of several ranks: over recorded trajectories, the metrics of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.protocol.rows import row_dicts

from .runs import Run, Task, opened

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

RECORDED = [
    "actor_rollout_ref.rollout.agent.default_agent_loop=trainer.ppo.loops:Recorded",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.actor.optim.optimizer=SGD",
    "actor_rollout_ref.actor.optim.lr=0.1",
    "trainer.total_training_steps=5",
    "data.shuffle=false",
]
SPLIT = "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2"  # the reference follows


def ray(ranks: int) -> list[str]:
    return ["trainer.controller=ray", f"trainer.n_gpus_per_node={ranks}"]


METRICS = ("pg_loss", "kl_loss", "entropy", "grad_norm", "ppo_kl", "pg_clipfrac")


def test_five_steps_of_two_by_two_ranks_have_the_metrics_of_one(task: Task, tmp_path: Path) -> None:
    """Data × tensor parallel; benchmarks/parallel.py has every layout."""
    one, run = (
        Run(tmp_path / name).train(task.overrides(tmp_path / name, *RECORDED, *more))
        for name, more in {"one": [], "four": [SPLIT, *ray(4)]}.items()
    )
    for metric in METRICS:
        expected = one.series(f"actor/{metric}")
        assert len(expected) == 5
        assert run.series(f"actor/{metric}") == pytest.approx(expected, rel=1e-5, abs=1e-6), metric


def test_a_layout_samples_with_the_whole_model(task: Task, tmp_path: Path) -> None:
    """The first step has equal weights and seeds, so equal tokens."""
    sampled = ["trainer.total_training_steps=2", "data.shuffle=false"]
    one, two = (
        Run(tmp_path / name).train(task.overrides(tmp_path / name, *sampled, *more))
        for name, more in {"one": [], "two": [SPLIT, *ray(2)]}.items()
    )
    texts = [[row["response_text"] for row in run.rollouts(1)] for run in (one, two)]
    assert texts[0] == texts[1]
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert two.series(name)[0] == pytest.approx(one.series(name)[0], rel=1e-4, abs=1e-6), name


def test_ranks_that_share_their_processes_with_the_trainer_take_some_of_the_groups(
    task: Task, tmp_path: Path
) -> None:
    """Rank 0 has groups 0 and 2, rank 1 has 1 and 3; neither waits for its own second group."""
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=trainer.ppo.loops:Gated"
    overrides = ("data.shuffle=false", "trainer.phase_deadline_floor_s=60", *ray(2))
    with opened(task.overrides(tmp_path, loop, *overrides)) as trainer:
        prompts = dict(enumerate(row_dicts(trainer.loader.next_batch())))
        trainer.source.start(prompts, [{"temperature": 1.0}] * 2)
        assert sorted(trainer.source.finish(2)) == [0, 1]
        (tmp_path / "gate").touch()
        assert sorted(trainer.source.finish(1))[0] in (2, 3)
        trainer.source.finish()
        assert len(trainer.source.rows(range(4))) == 8
