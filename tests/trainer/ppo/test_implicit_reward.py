"""PRIME through the loop: its reward model is trained, saved and continued with the policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hone.agents.collate import TRAJECTORY_ROW
from hone.config import ConfigError
from hone.protocol import DataProto
from hone.protocol.rows import object_array
from hone.rewards.failures import RewardError
from hone.trainer.ppo.implicit_reward import train_implicit_reward_model
from hone.trainer.ppo.plan import Plan
from hone.verl.dialect import load_config

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


def test_a_response_is_truncated_by_the_length_of_all_its_turns(
    train: Callable[..., Run], task: Task
) -> None:
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop=trainer.ppo.loops:TwoTurns"
    run = train(*prime(task), loop, "data.filter_truncate=true")  # 6 tokens, 4 of them its own
    assert min(run.series("training/preferred_groups")) < 1
    assert run.series("response_length/clip_ratio")[0] > 0


class RecordingWorkers:
    """Workers whose log-ratio of a row is the first token of its prompt."""

    data_parallel_size = 2

    def call(self, method: object, rows: DataProto, *, total_rows: int) -> DataProto:
        self.rows, self.total_rows = rows, total_rows
        log_ratio = rows.batch["prompts"][:, :1] * torch.ones(len(rows), 2)
        return DataProto.from_dict({"log_ratio": log_ratio}, meta_info={"metrics": {}})


def test_every_rank_updates_with_its_part_of_each_mini_batch(task: Task) -> None:
    places = [0, 1, 0, 0, 1, 0]  # four trajectories
    columns = {"prompts": torch.arange(6.0)[:, None], "response_mask": torch.ones(6, 2)}
    columns |= {"attention_mask": torch.ones(6, 3), "reward/rule": torch.zeros(6, 2)}
    arrays = {"uid": object_array(list("aaabbb")), TRAJECTORY_ROW: object_array(places)}
    batch, workers = DataProto.from_dict(columns, arrays), RecordingWorkers()
    config = load_config([*prime(task), "reward_model.mini_batch_size=2", "data.train_files=x"])
    train_implicit_reward_model(batch, workers, config)  # type: ignore[arg-type]
    assert workers.total_rows == 4
    steps = [part.batch["global_row"].tolist() for part in workers.rows.chunk(2)]
    assert all({row // 2 for row in part} == {0, 1} for part in steps)
    expected = [i / 5 for i in range(6)]  # divided by the largest return
    rewards = batch.batch["reward/implicit"][:, 0].tolist()
    assert rewards == pytest.approx(expected, rel=1e-4)
    totals = [2 * (0 + 1), 2 * 2, 2 * (3 + 4), 2 * 5]
    assert batch.meta_info["metrics"]["reward_model/raw_reward"] == pytest.approx(sum(totals) / 4)


def test_equal_scores_are_no_missing_signal(
    train: Callable[..., Run], task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(*prime(task), "trainer.total_training_steps=1", compute_score=lambda *_, **__: 1.0)
    assert run.series("actor/grad_norm")[0] > 0
    assert "teaches nothing" not in caplog.text


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
