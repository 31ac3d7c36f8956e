"""Which groups a filter keeps: by the score, by a value of the score function, by the curriculum."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ..runs import Run, task_row


def test_a_metric_of_the_score_function_may_decide(train: Callable[..., Run]) -> None:
    run = train(
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
        "custom_reward_function.name=detailed",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=1",
    )
    groups: dict[str, set[float]] = {}
    for row in run.rollouts(1):
        groups.setdefault(row["uid"], set()).add(row["acc"])
    assert all(seen == {0.0, 1.0} for seen in groups.values())


def test_a_row_that_could_not_be_scored_has_the_failure_score(train: Callable[..., Run]) -> None:
    run = train(
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=format",
        "custom_reward_function.name=fails_on_a",
        "reward_model.reward_kwargs.failure_score=-1",
        "actor_rollout_ref.rollout.n=8",
        "trainer.total_training_steps=1",
    )
    groups: dict[str, set[float]] = {}
    for row in run.rollouts(1):
        groups.setdefault(row["uid"], set()).add(-1.0 if row["format"] is None else row["format"])
    assert any(-1.0 in seen for seen in groups.values())
    assert all(len(seen) > 1 for seen in groups.values())


@pytest.mark.parametrize(
    ("filters", "column"),
    [
        (["algorithm.filter_groups.enable=true"], {"reward": 9.0}),
        (["curriculum_learning.enable=true"], {"score": 0.0}),
        (
            ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"],
            {"acc": 1.0},
        ),
    ],
)
def test_a_column_of_the_data_is_no_score(
    train: Callable[..., Run], tmp_path: Path, filters: list[str], column: dict[str, float]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(task_row(i, 7 * i, **column)) + "\n" for i in range(12)))
    run = train(
        *filters,
        f"data.train_files={file}",
        "algorithm.filter_groups.max_num_gen_batches=9",
        "custom_reward_function.name=detailed",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=1",
    )
    assert len(run.steps) == 1


def test_an_unknown_metric_names_those_there_are(train: Callable[..., Run]) -> None:
    with pytest.raises(KeyError, match=r"metric=accc.*acc"):
        train(
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.metric=accc",
            "custom_reward_function.name=detailed",
        )


@pytest.mark.parametrize("name", ["remove_extreme", "interquartile"])
def test_a_curriculum_filter_takes_what_the_batch_has(train: Callable[..., Run], name: str) -> None:
    run = train(
        "curriculum_learning.enable=true",
        f"curriculum_learning.fn_name={name}",
        "custom_reward_function.name=by_row",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=8",
        "trainer.total_training_steps=1",
    )
    assert 0 < len({row["uid"] for row in run.rollouts(1)}) < 8
    assert run.steps[0]["actor/grad_norm"] > 0
