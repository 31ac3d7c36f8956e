"""Dynamic sampling: groups without signal are replaced, within bounds that say what to do."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.protocol import DataProto
from hone.trainer.ppo.selection import DynamicSampling, NotEnoughSignal
from hone.verl.dialect import load_config

from ..runs import Run, Task, task_row

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


@pytest.mark.parametrize("estimator", ["grpo", "remax"])
def test_the_metrics_of_generation_are_those_of_all_chunks(
    train: Callable[..., Run], task: Task, estimator: str
) -> None:
    """Each group is a chunk; neither greedy responses nor a validation count."""
    run = train(
        "actor_rollout_ref.rollout.agent.default_agent_loop=trainer.ppo.loops:Measured",
        "algorithm.filter_groups.enable=true",
        f"algorithm.adv_estimator={estimator}",
        "trainer.test_freq=1",
        task.validated(),
    )
    for step, line in enumerate(run.steps, 1):
        calls = [json.loads(row["extra_info"])["index"] for row in run.rollouts(step)]
        assert len(set(calls)) == 4
        statistics = {"min": min(calls), "max": max(calls), "mean": sum(calls) / len(calls)}
        for name, value in statistics.items():
            assert line[f"timing_s/agent_loop/tool_calls/{name}"] == value


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
    message = str(caught.value)
    assert "3 generation rounds gave 0 groups" in message
    assert "In 12 of 12 groups all responses have the same reward: 1 in 100 %" in message
    assert "max_num_gen_batches=3" in message


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


class Script:
    """A source and a loader whose groups are known beforehand: which vary, and in which order they end."""

    generates_concurrently = True

    def __init__(self, varies: list[bool], per_round: int, seed: int = 0) -> None:
        self._varies, self._per_round = varies, per_round
        self._order = random.Random(seed)
        self._running: list[int] = []
        self.drawn = self.submitted = self.aborted = 0

    # -- the loader

    def next_batch(self) -> dict[str, np.ndarray]:
        self.drawn += 1
        return {}

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]

    # -- the source

    def submit(self, _: object) -> range:
        first = self.submitted
        self.submitted += self._per_round
        self._running += range(first, self.submitted)
        return range(first, self.submitted)

    def take(self, n_groups: int | None) -> DataProto:
        self._order.shuffle(self._running)
        count = len(self._running) if n_groups is None else n_groups
        numbers, self._running = sorted(self._running[:count]), self._running[count:]
        scores = [value for n in numbers for value in (0.0, 1.0 if self._varies[n] else 0.0)]
        uids = np.array([f"{n}" for n in numbers for _ in range(2)], dtype=object)
        batch = DataProto.from_dict(
            {
                "prompts": torch.zeros(len(uids), 1, dtype=torch.long),
                "responses": torch.zeros(len(uids), 1, dtype=torch.long),
                "token_level_scores": torch.tensor(scores)[:, None],
                "reward/rule": torch.tensor(scores)[:, None],
            },
            non_tensors={"uid": uids},
        )
        batch.meta_info["group_numbers"] = numbers
        return batch

    def abort(self) -> None:
        self.aborted, self._running = len(self._running), []


def collected(script: Script, needed: int, *more: str) -> tuple[list[int], float]:
    """The numbers of the groups of one step, and how many rounds it needed."""
    config = load_config(
        [
            "algorithm.filter_groups.enable=true",
            "algorithm.filter_groups.max_num_gen_batches=0",
            f"data.train_batch_size={needed}",
            "actor_rollout_ref.rollout.n=2",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={needed}",
            *more,
        ]
    )
    sampling = DynamicSampling(
        config,
        script,  # type: ignore[arg-type]
        script,  # type: ignore[arg-type]
        submit=script.submit,
        take=script.take,
        score=lambda batch: batch,
    )
    batch = sampling.collect()
    rounds = batch.meta_info["metrics"]["training/num_gen_batches"]
    return [int(uid) for uid in batch.non_tensor_batch["uid"][::2]], rounds


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(0, 999),
)
def test_overlapping_rounds_give_what_rounds_one_by_one_give(
    varies: list[bool], needed: int, per_round: int, seed: int
) -> None:
    varies = [*varies, *[True] * 80]
    one_by_one, overlapping = Script(varies, per_round, seed), Script(varies, per_round, seed + 1)
    expected = collected(one_by_one, needed, "algorithm.filter_groups.max_inflight_gen_batches=1")
    result = collected(overlapping, needed, "algorithm.filter_groups.max_inflight_gen_batches=3")
    assert result == expected
    assert overlapping.drawn == one_by_one.drawn == expected[1]


def test_percentiles_are_those_of_a_round_in_whatever_order_its_groups_end() -> None:
    curriculum = ["curriculum_learning.enable=true", "curriculum_learning.fn_name=interquartile"]
    bounds = ("lower_percentile_bound", "upper_percentile_bound")
    curriculum += [f"curriculum_learning.fn_params.{bound}=50" for bound in bounds]
    varies = [True, False, True, True] * 20
    results = [collected(Script(varies, 8, seed), 3, *curriculum) for seed in range(6)]
    assert all(result == results[0] for result in results)


def test_a_round_that_is_likely_needed_starts_before_the_last_one_ends() -> None:
    script = Script([False] * 12 + [True] * 40, per_round=8)
    assert collected(script, 8)[0] == list(range(12, 20))
    assert script.submitted == 24


def test_a_round_that_turns_out_not_to_be_needed_leaves_no_trace() -> None:
    scripts = [Script([False] * 2 + [True] * 40, per_round=8, seed=seed) for seed in range(9)]
    for script in scripts:
        assert collected(script, 6) == (list(range(2, 8)), 1.0)
        assert script.drawn == 1
    assert any(script.submitted > 8 and script.aborted > 0 for script in scripts)


def test_the_first_to_end_fill_the_batch_where_that_is_asked_for() -> None:
    script = Script([True] * 40, per_round=8, seed=3)
    numbers, _ = collected(script, 2, "algorithm.filter_groups.order=finish")
    assert numbers != [0, 1]


def test_a_limit_that_some_groups_pass_ends_with_what_was_seen() -> None:
    script = Script([False, False, True, False, False, False], per_round=2)
    with pytest.raises(NotEnoughSignal) as caught:
        collected(script, 3, "algorithm.filter_groups.max_num_gen_batches=3")
    message = str(caught.value)
    assert "3 generation rounds gave 1 groups with signal, 3 are needed" in message
    assert "In 5 of 6 groups" in message
    assert "0 in 92 % of the responses, 1 in 8 %" in message


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
