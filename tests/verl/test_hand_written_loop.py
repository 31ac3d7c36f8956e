"""A hand-written PPO loop over groups of verl's workers, in this process and on Ray."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.controller import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, WorkerGroup
from hone.models.load import load_tokenizer
from hone.protocol import DataProto
from hone.verl.actor_rollout_ref import ActorRolloutRefWorker
from hone.verl.dialect import load_config
from hone.verl.ray_trainer import apply_kl_penalty, compute_advantage
from hone.workers.critic import CriticWorker
from tests.trainer.runs import Task, make_task

PROMPTS, SAMPLES = 4, 2


class FixedKL:
    value = 0.05

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return make_task(tmp_path_factory.mktemp("task"))


def config_of(task: Task, folder: Path) -> Any:
    return load_config(
        task.overrides(
            folder,
            "algorithm.adv_estimator=gae",
            f"critic.model.path={task.model}",
            "actor_rollout_ref.actor.optim.total_training_steps=3",
            "critic.optim.total_training_steps=3",
        )
    )


def prompt_batch(task: Task) -> DataProto:
    """Returns prompts as verl's data loader does: left-padded tensors, each repeated."""
    tokenizer = load_tokenizer(str(task.model))
    ids = [tokenizer.encode(f"{n}+1=", add_special_tokens=False) for n in (3, 12, 140, 7)]
    width = max(map(len, ids))
    tokens = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    tensors = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    batch = DataProto.from_dict(tensors, {"answer": np.arange(len(ids)).astype(object)})
    return batch.repeat(SAMPLES, interleave=True)


def train_by_hand(task: Task, actor_rollout_ref: WorkerGroup, critic: WorkerGroup) -> list[Any]:
    """Runs three steps and returns the results of each."""
    results: list[Any] = []
    for _ in range(3):
        prompts = prompt_batch(task)
        batch = actor_rollout_ref.generate_sequences(prompts)
        batch.non_tensor_batch["uid"] = np.repeat(np.arange(PROMPTS), SAMPLES).astype(object)
        batch = batch.union(actor_rollout_ref.compute_log_prob(batch))
        batch = batch.union(actor_rollout_ref.compute_ref_log_prob(batch))
        batch = batch.union(critic.compute_values(batch))
        mask = batch.batch["response_mask"]
        batch.batch["token_level_scores"] = mask * (batch.batch["responses"] % 3 == 0)
        batch, kl = apply_kl_penalty(batch, FixedKL())  # type: ignore[arg-type]
        batch = compute_advantage(batch, "gae", gamma=1.0, lam=0.95)
        actor_output = actor_rollout_ref.update_actor(batch)
        critic_output = critic.update_critic(batch)
        results.append(
            {
                "responses": batch.batch["responses"].tolist(),
                "kl": kl["actor/reward_kl_penalty"],
                "loss": np.mean(actor_output.meta_info["metrics"]["actor/pg_loss"]),
                "value loss": np.mean(critic_output.meta_info["metrics"]["critic/vf_loss"]),
            }
        )
    return results


@pytest.fixture
def local_groups(task: Task, tmp_path: Path) -> Iterator[tuple[WorkerGroup, WorkerGroup]]:
    config = config_of(task, tmp_path)
    pool = ResourcePool([1])
    policy = ClassWithInitArgs(
        ActorRolloutRefWorker, config=config.actor_rollout_ref, role="actor_rollout_ref"
    )
    value = ClassWithInitArgs(CriticWorker, config=config.critic)
    groups = LocalWorkerGroup(pool, policy), LocalWorkerGroup(pool, value)
    for group in groups:
        group.init_model()
    yield groups
    for group in groups:
        group.shutdown()


def test_a_loop_written_by_hand_trains_policy_and_critic(
    task: Task, local_groups: tuple[WorkerGroup, WorkerGroup]
) -> None:
    results = train_by_hand(task, *local_groups)
    assert results[0]["kl"] == pytest.approx(0, abs=1e-6)  # the policy is still its reference
    assert abs(results[2]["kl"]) > 1e-4
    assert results[0]["responses"] != results[1]["responses"]  # each call samples again
    assert len({step["value loss"] for step in results}) == 3


def test_verls_columns_are_in_the_batch(
    task: Task, local_groups: tuple[WorkerGroup, WorkerGroup]
) -> None:
    batch = local_groups[0].generate_sequences(prompt_batch(task))
    expected = {"prompts", "responses", "input_ids", "attention_mask", "position_ids"}
    assert expected | {"response_mask", "rollout_log_probs"} <= set(batch.batch.keys())
    joined = torch.cat([batch.batch["prompts"], batch.batch["responses"]], 1)
    assert torch.equal(batch.batch["input_ids"], joined)


def test_do_sample_false_is_greedy(
    task: Task, local_groups: tuple[WorkerGroup, WorkerGroup]
) -> None:
    prompts = prompt_batch(task)
    prompts.meta_info["do_sample"] = False
    first, second = (
        local_groups[0].generate_sequences(prompts).batch["responses"] for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.equal(first[0], first[1])  # the same prompt twice


@pytest.mark.slow
def test_on_ray_the_loop_gives_the_same_results(
    task: Task, local_groups: tuple[WorkerGroup, WorkerGroup], tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    from hone.controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from hone.controller.ray_start import start_ray, stop_ray

    config = config_of(task, tmp_path / "ray")
    start_ray({"num_cpus": 4})
    groups: list[WorkerGroup] = []
    try:
        pool = RayResourcePool([1])
        policy = RayClassWithInitArgs(
            ActorRolloutRefWorker, config=config.actor_rollout_ref, role="actor_rollout_ref"
        )
        value = RayClassWithInitArgs(CriticWorker, config=config.critic)
        groups = [RayWorkerGroup(pool, policy), RayWorkerGroup(pool, value)]
        for group in groups:
            group.init_model()
        on_ray = train_by_hand(task, *groups)
        assert on_ray == train_by_hand(task, *local_groups)
    finally:
        for group in groups:
            group.shutdown()
        stop_ray(None)
