"""The collector: groups without signal are replaced, within bounds that say what to do."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import RandomSampler

from hone.data.loader import PromptLoader
from hone.protocol import DataProto
from hone.trainer.ppo.collector import Collector, NotEnoughSignal, create_ledger
from hone.trainer.ppo.source import GroupMetrics
from hone.verl.dialect import load_config

from ..runs import Run, Task

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


def test_a_resumed_run_takes_the_groups_that_an_uninterrupted_one_takes(
    train: Callable[..., Run],
) -> None:
    """What was drawn and not needed is pending in the checkpoint."""
    dapo = (*FILTERED, "data.gen_batch_size=6", "actor_rollout_ref.rollout.n=4")
    uninterrupted = train(*dapo, "trainer.total_training_steps=3", folder="whole")
    for steps in (1, 3):
        parts = train(
            *dapo,
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=1",
            "actor_rollout_ref.actor.optim.total_training_steps=3",
            folder="parts",
        )
    assert parts.numbers == uninterrupted.numbers
    assert [row["uid"] for row in parts.rollouts(3)] == [
        row["uid"] for row in uninterrupted.rollouts(3)
    ]
    state = json.loads((parts.checkpoint(3) / "trainer_state.json").read_text())
    assert state["ledger"]["steps_done"] == 3
    assert state["ledger"]["prompts"]


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
    """A source and a loader whose prompts are known beforehand: which vary, and in which order groups end."""

    def __init__(self, varies: list[bool], per_draw: int, seed: int = 0) -> None:
        self._varies, self._per_draw = varies, per_draw
        self._order = random.Random(seed)
        self._running: list[int] = []
        self._prompts: dict[int, int] = {}  # by number
        self.drawn = self.most_running = 0
        self.aborted: list[int] = []

    # -- the loader

    def next_batch(self) -> dict[str, np.ndarray]:
        indices = np.arange(self.drawn, self.drawn + self._per_draw).astype(object)
        self.drawn += self._per_draw
        return {"dataset_index": indices, "uid": indices.astype(str).astype(object)}

    # -- the source

    def start(self, prompts: dict[int, dict[str, Any]], samplings: Sequence[object]) -> None:
        self._running += prompts
        self.most_running = max(self.most_running, len(self._running))
        self._prompts |= {number: row["dataset_index"] for number, row in prompts.items()}

    def finish(self, num_groups: int | None) -> list[int]:
        self._order.shuffle(self._running)
        count = len(self._running) if num_groups is None else num_groups
        numbers, self._running = self._running[:count], self._running[count:]
        return numbers

    def rows(self, numbers: Sequence[int], samples: object) -> DataProto:
        prompts = [self._prompts[number] for number in numbers]
        scores = [value for p in prompts for value in (0.0, 1.0 if self._varies[p] else 0.0)]
        uids = np.array([f"{p}" for p in prompts for _ in range(2)], dtype=object)
        return DataProto.from_dict(
            {
                "prompts": torch.zeros(len(uids), 1, dtype=torch.long),
                "responses": torch.zeros(len(uids), 1, dtype=torch.long),
                "token_level_scores": torch.tensor(scores)[:, None],
                "reward/rule": torch.tensor(scores)[:, None],
            },
            non_tensors={"uid": uids, "index": np.repeat(np.array(prompts, dtype=object), 2)},
        )

    def metrics(self, numbers: Sequence[int], samples: object) -> list[GroupMetrics]:
        return [GroupMetrics([{"tool_calls": self._prompts[number]}], {}) for number in numbers]

    def release(self, numbers: Sequence[int]) -> None: ...

    def abort(self, numbers: Sequence[int]) -> None:
        self.aborted += [number for number in numbers if number in self._running]
        self._running = []


def collected(
    script: Script, needed: int, *more: str, steps: int = 1, loader: Any = None
) -> list[DataProto]:
    """The batches of the first steps."""
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
    ledger = create_ledger(config)
    collector = Collector(
        config,
        loader or script,
        ledger,
        script,  # type: ignore[arg-type]
        score=lambda batch: batch,
        phase=lambda name: nullcontext(),
        needs_greedy_baselines=False,
    )
    batches = []
    for _ in range(steps):
        batches.append(collector.collect())
        ledger.step_done()
    return batches


def uids(batch: DataProto) -> list[int]:
    return [int(uid) for uid in batch.non_tensor_batch["uid"][::2]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(0, 999),
)
def test_every_step_takes_the_first_groups_with_signal_whatever_ends_first(
    varies: list[bool], needed: int, per_draw: int, inflight: int, seed: int
) -> None:
    """The prompts of groups that started ahead and were not needed come first in the next step."""
    varies = [*varies, *[True] * 80]
    key = f"algorithm.filter_groups.max_inflight_gen_batches={inflight}"
    batches = collected(Script(varies, per_draw, seed), needed, key, steps=3)
    informative = [index for index, is_informative in enumerate(varies) if is_informative]
    assert [uid for batch in batches for uid in uids(batch)] == informative[: 3 * needed]


class Numbers:
    """A data set of twelve rows."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"number": index}


def test_a_sampler_that_draws_anew_at_each_iteration_gives_every_row_once() -> None:
    """The loader is never rewound, which would iterate over the sampler again."""
    sampler = RandomSampler(range(12), generator=torch.Generator().manual_seed(0))
    loader = PromptLoader(
        Numbers(), 3, shuffle=True, seed=1, drop_last=True, sampler=cast(Any, sampler)
    )
    batches = collected(Script([True] * 12, 3), 3, steps=4, loader=loader)
    rows = [int(i) for batch in batches for i in batch.non_tensor_batch["index"][::2]]
    assert sorted(rows) == list(range(12))


def test_percentiles_do_not_depend_on_the_order_in_which_groups_end() -> None:
    curriculum = ["curriculum_learning.enable=true", "curriculum_learning.fn_name=interquartile"]
    bounds = ("lower_percentile_bound", "upper_percentile_bound")
    curriculum += [f"curriculum_learning.fn_params.{bound}=50" for bound in bounds]
    varies = [True, False, True, True] * 20
    results = [uids(collected(Script(varies, 8, seed), 3, *curriculum)[0]) for seed in range(6)]
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize(("inflight", "most"), [(1, 8), (2, 16)])
def test_groups_that_are_likely_needed_start_before_the_others_end(
    inflight: int, most: int
) -> None:
    script = Script([False] * 12 + [True] * 40, per_draw=8)
    key = f"algorithm.filter_groups.max_inflight_gen_batches={inflight}"
    (batch,) = collected(script, 8, key)
    assert uids(batch) == list(range(12, 20))
    assert script.most_running == most


def test_a_group_that_turns_out_not_to_be_needed_is_aborted_and_comes_in_the_next_step() -> None:
    scripts = [Script([False] * 2 + [True] * 40, per_draw=8, seed=seed) for seed in range(9)]
    for script in scripts:
        first, second = collected(script, 6, steps=2)
        assert uids(first) == list(range(2, 8))
        assert first.meta_info["metrics"]["training/num_gen_batches"] == 2.0
        assert uids(second) == list(range(8, 14))
    assert any(script.aborted for script in scripts)


def test_the_first_to_end_fill_the_batch_where_that_is_asked_for() -> None:
    script = Script([True] * 40, per_draw=8, seed=3)
    (batch,) = collected(script, 2, "algorithm.filter_groups.order=finish", "data.gen_batch_size=8")
    assert uids(batch) != [0, 1]


def test_the_metrics_are_those_of_the_groups_of_the_batch() -> None:
    (batch,) = collected(Script([False, True] * 20, per_draw=4), 2)
    assert uids(batch) == [1, 3]
    metrics = batch.meta_info["metrics"]
    assert metrics["timing_s/agent_loop/tool_calls/min"] == 1
    assert metrics["timing_s/agent_loop/tool_calls/max"] == 3


def test_a_limit_that_some_groups_pass_ends_with_what_was_seen() -> None:
    script = Script([False, False, True, False, False, False], per_draw=2)
    with pytest.raises(NotEnoughSignal) as caught:
        collected(
            script, 3, "algorithm.filter_groups.max_num_gen_batches=3", "data.gen_batch_size=2"
        )
    message = str(caught.value)
    assert "3 generation rounds gave 1 groups with signal, 3 are needed" in message
    assert "In 5 of 6 groups" in message
    assert "0 in 92 % of the responses, 1 in 8 %" in message
