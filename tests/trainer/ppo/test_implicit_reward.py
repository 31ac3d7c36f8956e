"""PRIME through the loop: its reward model is trained, saved and continued with the policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hone.config import ConfigError, load_config
from hone.rewards.failures import RewardError
from hone.trainer.ppo.plan import Plan

from ..runs import Run, Task

STEPS = ("trainer.save_freq=1", "trainer.total_training_steps=3")


def prime(task: Task) -> tuple[str, ...]:
    return (
        "algorithm.adv_estimator=rloo",
        "reward_model.enable=true",
        "reward_model.type=prime",
        f"reward_model.model.path={task.model}",
        "reward_model.model.optim.lr=1e-2",
        "reward_model.mini_batch_size=4",
    )


def test_a_resumed_run_continues_with_the_trained_reward_model(
    train: Callable[..., Run], task: Task
) -> None:
    uninterrupted = train(*prime(task), *STEPS, folder="whole")
    train(*prime(task), "trainer.save_freq=1", "trainer.total_training_steps=2", folder="cut")
    resumed = train(*prime(task), *STEPS, folder="cut")
    assert resumed.numbers == uninterrupted.numbers
    ratios = uninterrupted.series("reward_model/raw_reward")
    assert len(set(ratios)) == 3
    assert 0 not in ratios


def test_implicit_rewards_reach_the_policy(train: Callable[..., Run], task: Task) -> None:
    both = train(*prime(task), folder="both")
    outcome = train(*prime(task), "algorithm.reward_dpo_coef=0", folder="outcome")
    assert both.series("reward_model/reward")[0] == outcome.series("reward_model/reward")[0]
    assert both.series("critic/returns/max")[0] != outcome.series("critic/returns/max")[0]


def test_the_filters_choose_from_an_oversampled_batch(
    train: Callable[..., Run], task: Task
) -> None:
    bounds = ("data.accuracy_lower_bound=0.25", "data.accuracy_upper_bound=0.45")
    run = train(*prime(task), "data.oversample_factor=3", "data.filter_accuracy=true", *bounds)
    rows = run.rollouts(1)
    assert len(rows) == 4 * 2
    shares = run.series("training/preferred_groups")
    assert 4 / 12 <= shares[0] < 1
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row["uid"], []).append(row["score"])
    assert all(0.25 <= sum(scores) / len(scores) <= 0.45 for scores in groups.values())


def test_outcomes_outside_0_to_1_are_refused(train: Callable[..., Run], task: Task) -> None:
    with pytest.raises(RewardError, match=r"outcomes from 0 to 1, but a score is 6"):
        train(*prime(task), compute_score=lambda *_, **__: 6.0)


def test_another_estimator_would_not_read_the_rewards(task: Task) -> None:
    keys = [*prime(task), "actor_rollout_ref.rollout.n=2", "algorithm.adv_estimator=grpo"]
    with pytest.raises(ConfigError, match=r"adv_estimator=rloo"):
        Plan.of(load_config(keys))


def test_the_estimator_by_name_needs_the_reward_model(task: Task) -> None:
    keys = ["algorithm.adv_estimator=prime_rloo", "actor_rollout_ref.rollout.n=2"]
    with pytest.raises(ConfigError, match=r"reward_model.type=prime"):
        Plan.of(load_config(keys))
