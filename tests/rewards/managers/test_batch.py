from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hone.protocol import DataProto
from hone.rewards.failures import FailurePolicy
from hone.rewards.managers.batch import BatchRewardManager
from hone.rewards.scorer import count_mishap

MakeBatch = Callable[..., DataProto]


def test_one_call_gets_the_lists_of_the_batch(tokenizer: Any, make_batch: MakeBatch) -> None:
    calls: list[dict[str, Any]] = []

    def score(**arguments: Any) -> list[Any]:
        calls.append(arguments)
        return [1.0, {"score": 2.0, "note": "n"}]

    data = make_batch(["a", "bc"], ["s", "t"], ["x", "y"], extra_info=[{"i": 0}, {"i": 1}])
    result = BatchRewardManager(tokenizer, 0, score, weight=3)(data, return_dict=True)
    assert result["reward_tensor"].sum(1).tolist() == [1.0, 2.0]
    assert result["reward_extra_info"] == {"score": [1.0, 2.0], "note": [None, "n"]}
    [call] = calls
    assert call["data_sources"] == ["s", "t"]
    assert call["solution_strs"] == ["a", "bc"]
    assert call["ground_truths"] == ["x", "y"]
    assert [info["i"] for info in call["extra_infos"]] == [0, 1]
    assert call["weight"] == 3


def test_a_scorer_may_be_async_and_return_an_array(tokenizer: Any, make_batch: MakeBatch) -> None:
    async def score(solution_strs: list[str]) -> np.ndarray:
        return np.array([len(text) for text in solution_strs])

    rewards = BatchRewardManager(tokenizer, 0, score)(make_batch(["a", "bc"]))
    assert rewards.sum(1).tolist() == [1.0, 2.0]


def test_mishaps_of_a_batch_become_metrics(tokenizer: Any, make_batch: MakeBatch) -> None:
    def score(solution_strs: list[str]) -> list[float]:
        count_mishap("symbolic_timeout")
        return [0.0] * len(solution_strs)

    manager = BatchRewardManager(tokenizer, 0, score)
    manager(make_batch(["a", "bc"]))
    assert manager.pop_metrics() == {"reward/failures/symbolic_timeout": 1.0}


def bad_value(solution_strs: list[str]) -> list[float]:
    return [1.0, float("nan")]


def too_few(solution_strs: list[str]) -> list[float]:
    return [1.0]


def no_list(solution_strs: list[str]) -> float:
    return 1.0


def no_dimension(solution_strs: list[str]) -> np.ndarray:
    return np.array(1.0)


def raising(solution_strs: list[str]) -> list[float]:
    raise ValueError("bad day")


def hanging(solution_strs: list[str]) -> list[float]:
    time.sleep(600)
    return []


@pytest.mark.parametrize(
    ("scorer", "rewards", "failures"),
    [
        (bad_value, [1.0, -1.0], {"nan": 1}),
        (too_few, [-1.0, -1.0], {"bad_return": 2}),
        (no_list, [-1.0, -1.0], {"bad_return": 2}),
        (raising, [-1.0, -1.0], {"exception": 2}),
        (no_dimension, [-1.0, -1.0], {"exception": 2}),
        (hanging, [-1.0, -1.0], {"timeout": 2}),
    ],
)
def test_an_invalid_value_fails_its_row_and_a_failed_call_all_rows(
    tokenizer: Any, make_batch: MakeBatch, scorer: Any, rewards: list[float], failures: Any
) -> None:
    policy = FailurePolicy("score", -1.0, 0.2 if scorer is hanging else 60.0)
    manager = BatchRewardManager(tokenizer, 0, scorer, policy=policy)
    manager.is_first_batch = False
    assert manager(make_batch(["a", "b"])).sum(1).tolist() == rewards
    assert manager.failures == failures


def test_without_a_scorer_the_table_is_used_row_by_row(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    data = make_batch(["#### 1", "Answer: 4"], ["openai/gsm8k", "math_dapo"], ["1", "4"])
    assert BatchRewardManager(tokenizer, 0)(data).sum(1).tolist() == [1.0, 1.0]


def test_a_coroutine_that_waits_for_ever_fails_at_the_deadline(
    tokenizer: Any, make_batch: MakeBatch
) -> None:
    async def score(solution_strs: list[str]) -> list[float]:
        await asyncio.sleep(30)
        return [1.0]

    manager = BatchRewardManager(tokenizer, 0, score, policy=FailurePolicy("score", -1.0, 0.1))
    manager.is_first_batch = False
    assert manager(make_batch(["a"])).sum().item() == -1.0
    assert manager.failures == {"timeout": 1}
