"""Credit by configuration alone: each estimator trains, and its switches change what they should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hone.agents.collate import input_ids
from hone.protocol import DataProto

from ..runs import Run, Task, opened

ESTIMATORS = {
    "grpo": [],
    "dr_grpo": [],
    "rloo": [],
    "rloo_vectorized": [],
    "opo": [],
    "gpg": ["actor_rollout_ref.actor.policy_loss.loss_mode=gpg"],
    "grpo_passk": [],
    "reinforce_plus_plus": [],
    "reinforce_plus_plus_baseline": [],
    "remax": ["actor_rollout_ref.rollout.n=1"],
    "gae": ["actor_rollout_ref.rollout.n=1"],
    "optimal_token_baseline": [],
    "tir_optimal_token_baseline": [],
    "gdpo": ["algorithm.gdpo_reward_keys=[acc,format]", "custom_reward_function.name=detailed"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_an_estimator_trains_by_its_name(train: Callable[..., Run], name: str) -> None:
    run = train(f"algorithm.adv_estimator={name}", *ESTIMATORS[name])
    assert len(run.steps) == 2
    assert all(line["actor/grad_norm"] > 0 for line in run.steps)
    assert run.rollouts(2)[0]["versions"][0] == 1  # the update reached the rollout


def test_dr_grpo_is_grpo_without_the_deviation(train: Callable[..., Run]) -> None:
    by_name = train("algorithm.adv_estimator=dr_grpo", folder="a")
    by_switch = train("algorithm.norm_adv_by_std_in_grpo=false", folder="b")
    assert by_name.numbers == by_switch.numbers
    assert by_name.numbers != train(folder="c").numbers


def test_sum_pi_squared_is_that_of_the_whole_distribution(task: Task, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    overrides = task.overrides(
        tmp_path,
        "algorithm.adv_estimator=optimal_token_baseline",
        "actor_rollout_ref.rollout.temperature=0.7",
        "algorithm.rollout_correction.bypass_mode=true",
    )
    with opened(overrides) as trainer:
        batch = trainer.estimate(trainer.collect())
    model = AutoModelForCausalLM.from_pretrained(task.model, attn_implementation="eager")
    for row in range(len(batch)):
        mask = batch.batch["attention_mask"][row].bool()
        ids = input_ids(batch)[row][mask]
        p = torch.softmax(model(ids[None]).logits[0] / 0.7, -1)
        length = int(batch.batch["response_mask"][row].sum())
        expected = p.square().sum(-1)[len(ids) - length - 1 : -1]
        result = batch.batch["sum_pi_squared"][row, :length]
        torch.testing.assert_close(result, expected.detach(), rtol=1e-4, atol=1e-5)
    assert batch.batch["old_log_probs"].equal(batch.batch["rollout_log_probs"])  # bypass


def test_remax_compares_with_the_greedy_response(train: Callable[..., Run]) -> None:
    run = train("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1")
    for row in run.rollouts(1):
        assert row["returns"][0] == pytest.approx(row["score"])
        assert row["advantages"][0] == pytest.approx(row["score"] - row["reward_baseline"])
    assert len({row["reward_baseline"] for row in run.rollouts(1)}) > 1


def test_gdpo_names_a_part_that_no_score_gives(train: Callable[..., Run]) -> None:
    with pytest.raises(KeyError, match="reward/politeness"):
        train("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[politeness]")


def test_kl_in_the_reward_is_subtracted_token_by_token(train: Callable[..., Run]) -> None:
    run = train(
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "trainer.total_training_steps=3",
    )
    assert run.series("actor/reward_kl_penalty_coeff") == [0.5] * 3
    assert run.series("actor/reward_kl_penalty")[0] == pytest.approx(0, abs=1e-5)
    assert abs(run.series("actor/reward_kl_penalty")[2]) > 1e-3
    row = run.rollouts(3)[0]
    for i, mask in enumerate(row["response_mask"]):
        kl = row["old_log_probs"][i] - row["ref_log_prob"][i]
        expected = row["token_level_scores"][i] - 0.5 * kl
        assert row["token_level_rewards"][i] == pytest.approx(expected * mask, abs=1e-5)


def test_kl_in_the_loss_holds_the_policy_back(train: Callable[..., Run]) -> None:
    shared = ("trainer.total_training_steps=6",)
    free = train(
        *shared,
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0",
        folder="free",
    )
    held = train(
        *shared,
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=50",
        folder="held",
    )
    assert free.series("actor/kl_loss")[0] == pytest.approx(0, abs=1e-6)
    assert held.series("actor/kl_loss")[-1] < 0.5 * free.series("actor/kl_loss")[-1]


def test_more_epochs_and_smaller_mini_batches_are_more_updates(train: Callable[..., Run]) -> None:
    run = train(
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",  # prompts: 4 rows of n=2
        "actor_rollout_ref.actor.shuffle=true",
    )
    assert run.rollouts(2)[0]["versions"][0] == 4  # 2 epochs × 2 mini-batches
    assert run.steps[0]["training/old_log_probs_recomputed"] == 1.0


def test_one_mini_batch_gives_the_update_that_recomputed_log_probs_give(
    train: Callable[..., Run],
) -> None:
    short = train(folder="short")
    long = train(
        "trainer.critic_warmup=0",
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=1e9",
        folder="long",
    )
    assert short.steps[0]["training/old_log_probs_recomputed"] == 0.0
    assert long.steps[0]["training/old_log_probs_recomputed"] == 1.0
    assert short.series("actor/grad_norm") == pytest.approx(
        long.series("actor/grad_norm"), rel=1e-4
    )


def test_warming_up_the_critic_leaves_the_actor_alone(train: Callable[..., Run]) -> None:
    run = train(
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.rollout.n=1",
        "trainer.critic_warmup=2",
        "trainer.total_training_steps=4",
    )
    assert ["actor/pg_loss" in line for line in run.steps] == [False, False, True, True]
    assert all("critic/vf_loss" in line for line in run.steps)
    assert [run.rollouts(s)[0]["versions"][0] for s in (1, 2, 3, 4)] == [0, 0, 0, 1]


def test_both_schedules_end_with_the_run_also_after_a_warm_up(task: Task, tmp_path: Path) -> None:
    from hone.trainer.ppo.plan import set_schedule_lengths
    from hone.verl.dialect import load_config

    ppo = ("algorithm.adv_estimator=gae", "trainer.critic_warmup=3")
    config = load_config(task.overrides(tmp_path, *ppo))
    planned = set_schedule_lengths(config, 10)
    assert planned.actor_rollout_ref.actor.optim.total_training_steps == 7
    assert planned.critic.optim.total_training_steps == 10
    assert set_schedule_lengths(config, 2).actor_rollout_ref.actor.optim.total_training_steps == 1
    configured = load_config(
        task.overrides(tmp_path, "actor_rollout_ref.actor.optim.total_training_steps=50")
    )
    scheduled = set_schedule_lengths(configured, 10)
    assert scheduled.actor_rollout_ref.actor.optim.total_training_steps == 50


def test_the_actor_s_schedule_does_not_see_the_warm_up(train: Callable[..., Run]) -> None:
    cosine = (
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.optim.min_lr_ratio=0.0",
    )
    alone = train(*cosine, "trainer.total_training_steps=2", folder="alone")
    after = train(*cosine, "trainer.total_training_steps=4", "trainer.critic_warmup=2")
    assert [line["actor/lr"] for line in after.steps[2:]] == alone.series("actor/lr")


def test_a_critic_learns_the_returns(train: Callable[..., Run]) -> None:
    run = train(
        "algorithm.adv_estimator=gae",
        "custom_reward_function.name=always_one",
        "trainer.critic_warmup=8",
        "trainer.total_training_steps=8",
    )
    assert run.series("critic/values/mean")[0] == 0  # a new head says nothing
    assert run.series("critic/vf_loss")[-1] < 0.5 * run.series("critic/vf_loss")[0]


def test_pf_ppo_draws_rows_again_by_score_and_keeps_what_it_drew_from(
    train: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.trainer.ppo.trainer import PPOTrainer

    learnt: list[list[str]] = []
    update = PPOTrainer.update

    def watched(self: PPOTrainer, batch: DataProto) -> dict[str, float]:
        learnt.append(list(batch.non_tensor_batch["trajectory_id"]))
        return update(self, batch)

    monkeypatch.setattr(PPOTrainer, "update", watched)
    run = train("algorithm.use_pf_ppo=true", "actor_rollout_ref.rollout.n=4")
    rows = run.rollouts(1)
    assert len({row["trajectory_id"] for row in rows}) == len(rows) == 16
    assert len(learnt[0]) == 16
    assert len(set(learnt[0])) < 16
    scores = [row["score"] for row in rows]
    assert run.steps[0]["critic/score/mean"] == pytest.approx(sum(scores) / 16)
    assert (
        run.numbers
        == train(
            "algorithm.use_pf_ppo=true", "actor_rollout_ref.rollout.n=4", folder="again"
        ).numbers
    )


def test_whitened_advantages_have_mean_zero(train: Callable[..., Run]) -> None:
    run = train("algorithm.adv_estimator=rloo", "algorithm.adv_norm=true")
    written = [a for row in run.rollouts(1) for a in row["advantages"]]
    assert sum(written) / len(written) == pytest.approx(0, abs=1e-5)
    assert torch.tensor(written).std().item() == pytest.approx(1, abs=1e-2)
