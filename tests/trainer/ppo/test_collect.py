"""Dynamic sampling: groups without signal are replaced, within bounds that say what to do."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hone.config import load_config
from hone.protocol import DataProto
from hone.trainer.ppo.collect import NotEnoughSignal, collect

from ..runs import Run, task_row

COUNT = itertools.count()
FILTERED = ("algorithm.filter_groups.enable=true", "custom_reward_function.name=by_row")


def test_groups_without_signal_are_replaced(train: Callable[..., Run]) -> None:
    run = train(*FILTERED, "trainer.total_training_steps=1", "actor_rollout_ref.rollout.n=4")
    rows = run.rollouts(1)
    groups: dict[str, set[float]] = {}
    for row in rows:
        groups.setdefault(row["uid"], set()).add(row["score"])
    assert len(groups) == 4
    assert len(rows) == 16
    assert all(len(scores) > 1 for scores in groups.values())
    assert run.steps[0]["training/num_gen_batches"] >= 2


def test_a_larger_generation_batch_needs_fewer_rounds(train: Callable[..., Run]) -> None:
    run = train(
        *FILTERED,
        "data.gen_batch_size=12",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.n=4",
    )
    assert run.steps[0]["training/num_gen_batches"] == 1
    assert len({row["uid"] for row in run.rollouts(1)}) == 4


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


def test_rounds_run_out_with_a_sentence(train: Callable[..., Run]) -> None:
    with pytest.raises(NotEnoughSignal) as caught:
        train(
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.max_num_gen_batches=3",
            "custom_reward_function.name=always_one",
        )
    said = str(caught.value)
    assert "3 generation rounds gave 0 groups" in said
    assert "In 12 of 12 groups all responses have the same reward: 1 in 100 %" in said
    assert "max_num_gen_batches=3" in said


@pytest.mark.parametrize(
    ("limits", "rounds", "key"),
    [
        ((), 10, "max_empty_gen_batches=10"),
        (("algorithm.filter_groups.max_num_gen_batches=0",), 10, "max_empty_gen_batches=10"),
        (("algorithm.filter_groups.max_empty_gen_batches=2",), 2, "max_empty_gen_batches=2"),
    ],
)
def test_rounds_that_keep_nothing_end_without_a_limit_too(
    train: Callable[..., Run],
    capfd: pytest.CaptureFixture[str],
    limits: tuple[str, ...],
    rounds: int,
    key: str,
) -> None:
    with pytest.raises(NotEnoughSignal, match=f"{rounds} generation rounds.*{key}"):
        train(
            "algorithm.filter_groups.enable=true",
            "custom_reward_function.name=always_one",
            *limits,
        )
    lines = [line for line in "".join(capfd.readouterr()).splitlines() if "round " in line]
    assert len(lines) == rounds
    assert f"round {rounds}: kept 0 of 4 groups; 0 of the 4 needed" in lines[-1]


def test_a_limit_that_some_groups_pass_ends_with_what_was_seen() -> None:
    scores = iter([[0, 0, 1, 1], [0, 1, 1, 1], [0, 0, 0, 0]])
    batches = (of_scores(values) for values in scores)
    config = load_config(
        [
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.max_num_gen_batches=3",
            "data.train_batch_size=3",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=3",
        ]
    )
    with pytest.raises(NotEnoughSignal) as caught:
        collect(lambda: next(batches), config)
    said = str(caught.value)
    assert "3 generation rounds gave 1 groups with signal, 3 are needed" in said
    assert "In 5 of 6 groups" in said
    assert "0 in 58 % of the responses, 1 in 42 %" in said


def of_scores(values: list[float]) -> DataProto:
    """Two groups of two responses."""
    uids = np.array([f"{next(COUNT)}-{i // 2}" for i in range(4)], dtype=object)
    uids[1::2] = uids[::2]
    return DataProto.from_dict(
        {"token_level_scores": torch.tensor(values, dtype=torch.float32)[:, None]},
        non_tensors={"uid": uids},
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
