"""The same program on Ray: the numbers of one process, two ranks like one, a dead worker told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hone.controller.failures import WorkerDied
from hone.verl.dialect import load_config

from .runs import ALPHABET, Run, Task, opened

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

RAY = "trainer.controller=ray"
TWO_RANKS = (RAY, "trainer.n_gpus_per_node=2")
ALGORITHMS = {
    "grpo": ["actor_rollout_ref.actor.use_kl_loss=true"],
    "ppo": [
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_epochs=2",
    ],
}

SGD = [  # Adam makes a full step of rounding noise where a gradient is almost zero
    f"{role}.optim.{key}"
    for role in ("actor_rollout_ref.actor", "critic")
    for key in ("optimizer=SGD", "lr=0.5")
]
SHARED_OUT = {
    "grpo": ALGORITHMS["grpo"],
    "ppo": ALGORITHMS["ppo"],
    "shuffled": [
        *ALGORITHMS["ppo"],
        *SGD,
        "actor_rollout_ref.actor.shuffle=true",
        "critic.shuffle=true",
    ],
    "another mini-batch for the critic": [
        *ALGORITHMS["ppo"],
        *SGD,
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "critic.ppo_mini_batch_size=2",
    ],
}


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_one_rank_on_ray_has_the_metrics_of_one_process(
    train: Callable[..., Run], task: Task, name: str
) -> None:
    shared = [*ALGORITHMS[name], task.validated(), "trainer.save_freq=2", "trainer.test_freq=2"]
    local = train(*shared, "trainer.controller=local", folder="local")
    remote = train(*shared, RAY, folder="ray")
    assert len(local.metrics) == 3
    assert remote.numbers == local.numbers
    assert remote.rollouts(2) == local.rollouts(2)
    for there, here in zip(remote.steps, local.steps, strict=True):
        traffic = [name for name in here if name.startswith("traffic/")]
        assert traffic == [name for name in there if name.startswith("traffic/")]
        assert {name: there[name] for name in traffic} == {name: here[name] for name in traffic}
        assert here["traffic/actor/update_actor_bytes"] > 0


@pytest.mark.parametrize(
    ("balanced", "name"),
    [
        ("true", "grpo"),
        ("false", "ppo"),
        ("true", "shuffled"),
        ("false", "shuffled"),
        ("true", "another mini-batch for the critic"),
    ],
)
def test_two_ranks_have_the_metrics_of_one(
    train: Callable[..., Run], name: str, balanced: str
) -> None:
    shared = [*SHARED_OUT[name], "actor_rollout_ref.rollout.n=3", "data.max_response_length=10"]
    profiler = "actor_rollout_ref.actor.profiler"
    shared += ["global_profiler.steps=[2]", f"{profiler}.enable=true", f"{profiler}.ranks=[1]"]
    one = train(*shared, folder="one")
    two = train(*shared, *TWO_RANKS, f"trainer.balance_batch={balanced}", folder="two")
    traces = sorted(file.name for file in (two.folder / "profile").iterdir())
    assert traces == ["step_2-actor+rollout-rank_1.json.gz"]
    for step in (1, 2):
        rows = [
            {row["trajectory_id"]: row["response_ids"] for row in run.rollouts(step)}
            for run in (one, two)
        ]
        assert rows[0] == rows[1]  # who decodes a prompt does not change its response
    names = [
        n
        for n in one.numbers[0]
        if n.startswith(("actor/", "critic/", "reward/", "response_length/"))
    ]
    assert {"actor/pg_loss", "actor/grad_norm", "reward/mean"} <= set(names)
    for first, second in zip(one.numbers, two.numbers, strict=True):
        for metric in names:
            assert second[metric] == pytest.approx(first[metric], rel=1e-4, abs=1e-6), metric


JUDGES = {
    "prime": [
        "reward_model.model.path=${actor_rollout_ref.model.path}",
        "reward_model.model.optim.optimizer=SGD",
        "reward_model.model.optim.lr=0.5",
        "reward_model.mini_batch_size=4",
    ],
    "prm": ["reward_model.split_step_char=0", "reward_model.step_separator=1"],
}
"""Reward models of responses' parts; the process reward model's steps end at a 0."""


@pytest.mark.parametrize("kind", JUDGES)
def test_a_reward_model_of_parts_on_two_ranks_has_the_metrics_of_one(
    train: Callable[..., Run], tmp_path: Path, kind: str
) -> None:
    from workers.test_process_reward_model import save_prm

    from hone.models.tiny import character_tokenizer

    shared = [*SGD, "algorithm.adv_estimator=rloo", "reward_model.enable=true"]
    shared += [f"reward_model.type={kind}", *JUDGES[kind]]
    expected = {"reward_model/dpo_loss", "reward_model/reward"}
    if kind == "prm":
        model = save_prm(tmp_path / "judge", tokenizer=character_tokenizer(ALPHABET))
        shared.append(f"reward_model.model.path={model}")
        expected = {"instant_rewards/outcome_reward/mean", "num_of_steps/mean"}
    one = train(*shared, folder="one")
    two = train(*shared, *TWO_RANKS, folder="two")
    groups = ("actor/", "critic/", "reward_model/", "instant_rewards/", "num_of_steps/")
    names = [n for n in one.numbers[0] if n.startswith(groups)]
    assert expected <= set(names)
    for first, second in zip(one.numbers, two.numbers, strict=True):
        for metric in names:
            assert second[metric] == pytest.approx(first[metric], rel=1e-4, abs=1e-6), metric


def test_two_ranks_continue_what_one_began(train: Callable[..., Run]) -> None:
    longer = "trainer.total_training_steps=4"
    save = "trainer.save_freq=2"
    uninterrupted = train(save, longer, folder="whole")
    train(save, folder="parts")
    parts = train(save, longer, *TWO_RANKS, folder="parts")
    assert [line["step"] for line in parts.metrics] == [1, 2, 3, 4]
    assert parts.series("actor/grad_norm") == pytest.approx(
        uninterrupted.series("actor/grad_norm"), rel=1e-3
    )


def test_it_learns_on_two_ranks(train: Callable[..., Run]) -> None:
    run = train(
        *ALGORITHMS["ppo"],
        *TWO_RANKS,
        "actor_rollout_ref.rollout.n=8",
        "algorithm.kl_ctrl.kl_coef=0",
        "trainer.total_training_steps=12",
    )
    rewards = run.series("reward/mean")
    assert sum(rewards[-3:]) / 3 > 1.5 * sum(rewards[:3]) / 3


def test_roles_in_processes_of_their_own_give_the_same_numbers(
    train: Callable[..., Run], task: Task, tmp_path: Path
) -> None:
    from hone.controller import RayWorkerGroup, ResourcePoolManager, Role
    from hone.models.load import load_tokenizer
    from hone.trainer.ppo.trainer import PPOTrainer
    from hone.verl.actor_rollout_ref import ActorRolloutRefWorker
    from hone.workers.critic import CriticWorker

    together = train(*ALGORITHMS["ppo"], folder="together")
    workers = {
        Role.ActorRollout: ActorRolloutRefWorker,
        Role.RefPolicy: ActorRolloutRefWorker,
        Role.Critic: CriticWorker,
    }
    trainer = PPOTrainer(
        load_config(task.overrides(tmp_path / "apart", *ALGORITHMS["ppo"])),
        load_tokenizer(str(task.model)),
        workers,
        ResourcePoolManager({str(role): [1] for role in workers}, {r: str(r) for r in workers}),
        RayWorkerGroup,
    )
    trainer.init_workers()
    try:
        trainer.fit()
    finally:
        trainer.shutdown()
    assert Run(tmp_path / "apart").numbers == together.numbers


def test_a_dead_worker_is_told_with_rank_role_and_last_lines(task: Task, tmp_path: Path) -> None:
    with opened(task.overrides(tmp_path, *TWO_RANKS)) as trainer:
        trainer.step()
        process = trainer.actor._executor._processes[1]
        os.kill(process.pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(WorkerDied) as caught:
            trainer.step()
        seconds = time.monotonic() - started
    message = str(caught.value)
    assert "rank 1" in message
    assert "'rollout'" in message
    assert f"pid {process.pid}" in message
    assert "last log lines" in message
    assert seconds < 300  # half of what a collective waits for a lost peer


def test_four_ranks_of_two_slots_have_the_metrics_of_two_ranks(train: Callable[..., Run]) -> None:
    """Data-parallel size is not world size: a mesh of 2 × 2, whose slots' ranks see the same rows."""
    shared = [
        "actor_rollout_ref.actor.strategy=tests.engine.slot_engine:SlotEngine",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=0.5",
        RAY,
    ]
    two = train(*shared, "trainer.n_gpus_per_node=2", folder="two")
    four = train(*shared, "trainer.n_gpus_per_node=4", folder="four")
    assert len(two.steps) == 2
    assert two.series("actor/grad_norm") != [0.0, 0.0]
    assert four.numbers == two.numbers
    assert four.rollouts(2) == two.rollouts(2)


APART = ("actor_rollout_ref.hybrid_engine=false", "ray_kwargs.ray_init.num_cpus=3")


@pytest.mark.parametrize("adapters", [0, 4])
def test_a_rollout_pool_of_its_own_gives_the_numbers_of_a_shared_one(
    train: Callable[..., Run], adapters: int
) -> None:
    lora = f"actor_rollout_ref.model.lora_rank={adapters}"
    together = train(lora, "trainer.controller=local", folder="together")
    apart = train(lora, *APART, folder="apart")
    weight_bytes = apart.series("perf/weight_bytes")
    assert len(set(weight_bytes)) == 1
    assert weight_bytes[0] > 0
    assert set(together.series("perf/weight_bytes")) == {0.0}
    assert apart.series("traffic/weights_bytes") == weight_bytes
    assert set(together.series("traffic/weights_bytes")) == {0.0}
    keys = ("perf/weight_bytes",)
    assert [_without(line, keys) for line in apart.numbers] == [
        _without(line, keys) for line in together.numbers
    ]
    assert apart.rollouts(2) == together.rollouts(2)


def test_a_reward_model_in_its_own_pool_gives_the_numbers_of_a_shared_one(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    from workers.test_reward_model import save_classifier

    model = save_classifier(tmp_path / "scorer", ALPHABET)
    scored = ("reward_model.enable=true", f"reward_model.model.path={model}")
    together = train(*scored, "trainer.controller=local", folder="together")
    apart = train(
        *scored,
        "reward_model.enable_resource_pool=true",
        "reward_model.nnodes=1",
        "reward_model.n_gpus_per_node=2",
        "reward_model.model.fsdp_config.param_offload=true",
        "ray_kwargs.ray_init.num_cpus=4",
        folder="apart",
    )
    for step in (1, 2):
        for one, other in zip(together.rollouts(step), apart.rollouts(step), strict=True):
            assert one["response_ids"] == other["response_ids"]
            assert sum(one["reward/model"]) == pytest.approx(sum(other["reward/model"]), abs=1e-5)


def _without(line: dict[str, object], keys: tuple[str, ...]) -> dict[str, object]:
    return {name: value for name, value in line.items() if name not in keys}


def test_groups_of_very_different_length_on_two_ranks_wait_for_nothing_but_each_other(
    train: Callable[..., Run],
) -> None:
    uneven = (
        "actor_rollout_ref.rollout.agent.default_agent_loop=trainer.ppo.loops:TwentyFold",
        "data.max_response_length=20",
        "data.shuffle=false",
    )
    one = train(*uneven, "trainer.controller=local", folder="one")
    two = train(*uneven, *TWO_RANKS, folder="two")
    lengths = [len(row["response_ids"]) for row in two.rollouts(1)]
    assert (min(lengths), max(lengths)) == (1, 20)
    assert [row["response_ids"] for row in two.rollouts(1)] == [
        row["response_ids"] for row in one.rollouts(1)
    ]
