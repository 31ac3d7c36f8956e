"""Trajectories of several rows through whole runs: advantages by hand, filters, validation, resume."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.agents.collate import TRAJECTORY_ROW
from hone.protocol import DataProto
from hone.protocol.padding import split_padded, without_padding
from hone.trainer.ppo.collector import NotEnoughSignal
from hone.trainer.ppo.credit import balance
from hone.workers.actor import minibatches

from ..rewards import share
from ..runs import Run, Task, scored_text

Rows = list[dict[str, Any]]
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop=trainer.ppo.loops:"


def trajectories(rows: Rows) -> Iterator[Rows]:
    """The rows of each trajectory, checked to be in order."""
    for _, group in itertools.groupby(rows, key=lambda row: row["trajectory_id"]):
        of_one = list(group)
        assert [row["trajectory_row"] or 0 for row in of_one] == list(range(len(of_one)))
        yield of_one


def by_prompt(rows: Rows) -> list[list[Rows]]:
    parts = sorted(trajectories(rows), key=lambda of_one: of_one[0]["uid"])
    return [list(g) for _, g in itertools.groupby(parts, key=lambda of_one: of_one[0]["uid"])]


def test_groups_compare_trajectories_whatever_their_rows(train: Callable[..., Run]) -> None:
    run = train(LOOP + "Summarises")
    for step in (1, 2):
        rows = run.rollouts(step)
        assert len(list(trajectories(rows))) == 8
        assert {len(of_one) for of_one in trajectories(rows)} == {1, 2, 3}
        for group in by_prompt(rows):
            scores = [share(scored_text(of_one[-1])) for of_one in group]
            deviation = np.std(scores, ddof=1)
            for of_one, score in zip(group, scores, strict=True):
                expected = (score - np.mean(scores)) / (deviation + 1e-6)
                for row in of_one:
                    assert row["score"] == pytest.approx(score)
                    assert row["advantages"] == pytest.approx([expected] * len(row["advantages"]))
                    expected_score = (
                        score if row is of_one[-1] else 0.0
                    )  # the last row alone is scored
                    assert sum(row["token_level_scores"]) == pytest.approx(expected_score)
        line = run.steps[step - 1]
        means = [of_one[0]["score"] for of_one in trajectories(rows)]
        assert line["critic/score/mean"] == pytest.approx(np.mean(means))
        assert line["trajectory_rows/mean"] == len(rows) / 8


def test_values_continue_from_row_to_row(train: Callable[..., Run]) -> None:
    """returns = A + V of GAE over the joined policy tokens of a trajectory, by hand."""
    run = train(LOOP + "Summarises", "algorithm.adv_estimator=gae", "algorithm.lam=0.9")
    for of_one in trajectories(run.rollouts(2)):
        values, rewards, returns = (
            [x for row in of_one for x in row[name]]
            for name in ("values", "token_level_rewards", "returns")
        )
        ahead = 0.0
        for t in reversed(range(len(values))):
            next_value = values[t + 1] if t + 1 < len(values) else 0.0
            ahead = rewards[t] + next_value - values[t] + 0.9 * ahead
            assert returns[t] == pytest.approx(ahead + values[t], abs=1e-5)


def test_a_loops_own_scores_are_summed_over_its_rows(train: Callable[..., Run]) -> None:
    run = train(LOOP + "ScoresRows", "algorithm.adv_estimator=rloo")
    for group in by_prompt(run.rollouts(1)):
        for of_one in group:
            assert sum(of_one[0]["token_level_scores"]) == 1.0 + of_one[0]["sample_index"]
            assert not any(any(row["token_level_scores"]) for row in of_one[1:])
            advantage = 2.0 * of_one[0]["sample_index"] - 1.0
            for row in of_one:
                assert row["advantages"] == pytest.approx([advantage] * len(row["advantages"]))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_mini_batches_count_trajectories_on_any_number_of_ranks(ranks: int) -> None:
    places = [0, 1, 2, 0, 0, 1, 0, 0, 1, 2, 0]  # six trajectories
    batch = DataProto.from_dict(
        {"attention_mask": torch.ones(11, 3), "row": torch.arange(11)},
        {TRAJECTORY_ROW: np.array([None if p == 0 else p for p in places], dtype=object)},
    )
    dealt, _ = balance(batch, ranks, [2, 4], by_length=True)
    parts = [without_padding(part) for part in split_padded(dealt, ranks)]
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    of_ranks = [
        minibatches(part, rows_per_update=2, epochs=1, shuffle_seed=None, total_rows=6)
        for part in parts
    ]
    updates = [sorted(torch.cat([p.batch["row"] for p in u]).tolist()) for u in zip(*of_ranks)]  # noqa: B905
    assert updates == [[0, 1, 2, 3], [4, 5, 6], [7, 8, 9, 10]]


def test_a_step_has_as_many_updates_as_its_prompts_say(train: Callable[..., Run]) -> None:
    """More rows than prompts × n are no reason for a second update, which would need old log-probs."""
    for mini, updates in ((4, 1), (2, 2)):
        key = f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}"
        run = train(LOOP + "Summarises", key, folder=str(mini))
        assert {version for row in run.rollouts(2) for version in row["versions"]} == {updates}


@pytest.mark.parametrize("metric", ["score", "acc"])
def test_filters_compare_trajectories(train: Callable[..., Run], metric: str) -> None:
    """Every trajectory scores the same: rows differ (0 before the last), trajectories do not."""
    with pytest.raises(NotEnoughSignal, match="100 % of the responses"):
        train(
            LOOP + "Summarises",
            "custom_reward_function.name=constant",
            "algorithm.filter_groups.enable=true",
            f"algorithm.filter_groups.metric={metric}",
            "algorithm.filter_groups.max_num_gen_batches=2",
        )


def test_dynamic_sampling_fills_the_batch_with_trajectories(train: Callable[..., Run]) -> None:
    run = train(LOOP + "Summarises", "algorithm.filter_groups.enable=true")
    for step in (1, 2):
        groups = by_prompt(run.rollouts(step))
        assert [len(group) for group in groups] == [2] * 4
        assert all(len({of_one[0]["score"] for of_one in group}) == 2 for group in groups)


def test_validation_counts_trajectories(train: Callable[..., Run], task: Task) -> None:
    run = train(
        LOOP + "Summarises",
        task.validated(),
        "custom_reward_function.name=detailed",
        "trainer.total_training_steps=1",
    )
    import pyarrow.parquet as pq

    rows = pq.read_table(run.folder / "validation" / "step_1.parquet").to_pylist()
    last = [of_one[-1] for of_one in trajectories(rows)]
    assert (len(last), len(rows)) == (6, 12)
    line = run.steps[0]
    mean = np.mean([share(scored_text(row)) for row in last])
    assert line["val-aux/lexical/reward/mean@1"] == pytest.approx(mean)
    accuracy = np.mean([scored_text(row)[:1] in tuple("abcdefghijkl") for row in last])
    assert line["val-core/lexical/acc/mean@1"] == pytest.approx(accuracy)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=remax"],
        ["algorithm.use_pf_ppo=true", "algorithm.adv_estimator=gae"],
        ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[acc,format]"],
        ["algorithm.use_kl_in_reward=true", "algorithm.adv_estimator=reinforce_plus_plus"],
        ["algorithm.rollout_correction.rollout_is=sequence"],
        ["trainer.response_metrics=true"],
    ],
    ids=lambda overrides: overrides[-1].partition("=")[2],
)
def test_every_part_of_a_step_takes_them(train: Callable[..., Run], overrides: list[str]) -> None:
    run = train(LOOP + "Summarises", "custom_reward_function.name=detailed", *overrides)
    assert [math.isfinite(x) for x in run.series("actor/pg_loss")] == [True, True]
    if "response_metrics" in overrides[0]:
        best = [max(of_one[-1]["acc"] for of_one in group) for group in by_prompt(run.rollouts(1))]
        assert run.steps[0]["group_info/pass_at_n/whole_batch/mean"] == np.mean(best)
    for of_one in trajectories(run.rollouts(1)):
        if "remax" in overrides[0]:
            assert len({row["reward_baseline"] for row in of_one}) == 1
        assert [row["acc"] is None for row in of_one] == [True] * (len(of_one) - 1) + [False]


def test_a_resumed_run_is_the_run(train: Callable[..., Run]) -> None:
    uninterrupted = train(LOOP + "Summarises", "trainer.total_training_steps=3")
    for steps in (1, 3):
        parts = train(
            LOOP + "Summarises",
            f"trainer.total_training_steps={steps}",
            "trainer.save_freq=1",
            "actor_rollout_ref.actor.optim.total_training_steps=3",
            folder="parts",
        )
    assert parts.numbers == uninterrupted.numbers


def test_a_loop_of_one_row_in_a_list_is_a_loop_of_one_row(
    train: Callable[..., Run], tmp_path: Path
) -> None:
    file = tmp_path / "in_a_list.py"
    file.write_text(
        "from trainer.ppo.loops import ByLength\n\n\n"
        "class InAList(ByLength):\n"
        "    async def run(self, sampling_params, **row):\n"
        "        return [await super().run(sampling_params, **row)]\n"
    )
    plain = train(LOOP + "ByLength", folder="plain")
    key = "actor_rollout_ref.rollout.agent.default_agent_loop"
    listed = train(f"{key}={file}:InAList", folder="listed")
    assert listed.numbers == plain.numbers
    assert "trajectory_row" not in listed.rollouts(1)[0]


def test_the_loop_of_the_agents_page_trains(train: Callable[..., Run], tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "agents.md").read_text(encoding="utf-8")
    code = next(c for c in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "Draft" in c)
    (tmp_path / "page.py").write_text(code)
    key = "actor_rollout_ref.rollout.agent.default_agent_loop"
    run = train(f"{key}={tmp_path / 'page.py'}:DraftAndFinal")
    for draft, final in trajectories(run.rollouts(2)):
        assert final["prompt_ids"] == [*draft["prompt_ids"], *draft["response_ids"][:8]]
        assert draft["advantages"][:1] == final["advantages"][:1]
