from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hone.plugins import load_extern_object
from hone.protocol import DataProto
from hone.rewards.failures import FailurePolicy, RewardError
from hone.rewards.managers.prime import PrimeRewardManager
from hone.rewards.managers.rule import NaiveRewardManager
from hone.rewards.scorer import ScorerSignatureError
from hone.rewards.scores import table

MakeBatch = Callable[..., DataProto]

SCORER = """
import asyncio, os, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "raise":
        raise ValueError("bad day")
    if solution_str == "nan":
        return float("nan")
    if solution_str == "exit":
        os._exit(3)
    return {"score": 1.0 + bonus, "pid": os.getpid(), "turns": extra_info["num_turns"]}

async def async_score(solution_str):
    await asyncio.sleep(0.01)
    return 2.0
"""


@pytest.fixture
def prime(tokenizer: Any) -> Iterator[Callable[..., PrimeRewardManager]]:
    managers: list[PrimeRewardManager] = []

    def make(compute_score: Any = None, **keywords: Any) -> PrimeRewardManager:
        keywords |= {"compute_score": compute_score, "num_processes": 2}
        managers.append(PrimeRewardManager(tokenizer, 0, **keywords))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


def test_a_scorer_that_hangs_raises_returns_nan_or_dies_fails_only_its_own_row(
    prime: Callable[..., PrimeRewardManager],
    make_batch: MakeBatch,
    scorer_file: Callable[[str], str],
) -> None:
    scorer = load_extern_object(scorer_file(SCORER), "compute_score")
    texts = ["a", "hang", "b", "raise", "nan", "exit", "c"]
    expected = [1.5, -1.0, 1.5, -1.0, -1.0, -1.0, 1.5]
    for timeout_s in (3.0, 15.0, 60.0):  # 3 s are enough, unless the machine stands still
        policy = FailurePolicy("score", -1.0, timeout_s)
        manager = prime(functools.partial(scorer, bonus=0.5), policy=policy)
        result = manager(make_batch(texts, __num_turns__=[3] * 7), return_dict=True)
        rewards = result["reward_tensor"].sum(1).tolist()
        if rewards == expected:
            break
    assert rewards == expected
    assert manager.pop_metrics() == {
        "reward/failures/crash": 1.0,
        "reward/failures/exception": 1.0,
        "reward/failures/nan": 1.0,
        "reward/failures/timeout": 1.0,
    }
    assert result["reward_extra_info"]["turns"][0] == 3
    next_result = manager(make_batch(["a"]), return_dict=True)
    assert next_result["reward_tensor"].sum() == 1.5


def test_the_strict_policy_stops_the_run(
    prime: Callable[..., PrimeRewardManager],
    make_batch: MakeBatch,
    scorer_file: Callable[[str], str],
) -> None:
    scorer = load_extern_object(scorer_file(SCORER), "compute_score")
    manager = prime(scorer, policy=FailurePolicy("raise", 0.0, 60.0))
    with pytest.raises(RewardError, match=r"row 1 .*ValueError: bad day"):
        manager(make_batch(["a", "raise"]))


def test_async_scorers_work(
    prime: Callable[..., PrimeRewardManager],
    make_batch: MakeBatch,
    scorer_file: Callable[[str], str],
) -> None:
    manager = prime(load_extern_object(scorer_file(SCORER), "async_score"))
    assert manager(make_batch(["a", "b"])).sum(1).tolist() == [2.0, 2.0]


def test_scores_equal_the_naive_managers(
    prime: Callable[..., PrimeRewardManager], tokenizer: Any, make_batch: MakeBatch
) -> None:
    texts = ["#### 1", "#### 2", "<answer>2*3</answer>", r"\boxed{0.5}", "Answer: 3", "x"]
    truth = {"target": 6, "numbers": [2, 3]}
    sources = ["openai/gsm8k"] * 2 + ["countdown", "lighteval/MATH", "math_dapo", "openai/gsm8k"]
    data = make_batch(texts, sources, ["1", "1", truth, r"\frac12", "3", "1"])
    expected = NaiveRewardManager(tokenizer, 0, format_score=0.1)(data, return_dict=True)
    result = prime(format_score=0.1)(data, return_dict=True)
    assert result["reward_tensor"].tolist() == expected["reward_tensor"].tolist()
    assert result["reward_extra_info"] == expected["reward_extra_info"]


def test_scores_registered_later_reach_the_processes(
    prime: Callable[..., PrimeRewardManager],
    make_batch: MakeBatch,
    scorer_file: Callable[[str], str],
) -> None:
    before = table.registered_scores()
    path = scorer_file("def f(solution_str): return 7\n")
    manager = prime()
    try:
        assert manager(make_batch(["#### 1"], "openai/gsm8k", ["1"])).sum() == 1.0
        table.register_score("mine", f"{path}:f")
        assert manager(make_batch(["x"], "mine")).sum() == 7.0
    finally:
        table.restore_scores(before)


def test_a_local_function_is_refused_with_the_reason(
    prime: Callable[..., PrimeRewardManager], make_batch: MakeBatch
) -> None:
    with pytest.raises(TypeError, match=r"local to another function.*naive manager"):
        prime(lambda solution_str: 1.0)(make_batch(["a"]))


@functools.wraps(table.default_compute_score)
def wrapper(*args: Any, **kwargs: Any) -> Any:
    return 2.0 * table.default_compute_score(*args, **kwargs)


def test_a_wrapper_with_the_name_of_another_function_is_refused(
    prime: Callable[..., PrimeRewardManager], make_batch: MakeBatch
) -> None:
    with pytest.raises(TypeError, match=r"another function.*functools\.wraps.*naive manager"):
        prime(wrapper)(make_batch(["#### 1"], "gsm8k", ["1"]))


def test_a_scorer_that_the_worker_cannot_import_is_an_error(
    prime: Callable[..., PrimeRewardManager],
    make_batch: MakeBatch,
    scorer_file: Callable[[str], str],
) -> None:
    path = scorer_file("import os\nif os.environ.get('HONE_NEVER') is None: pass\ndef f(x): pass")
    scorer = load_extern_object(path, "f")
    scorer_file("def g(x): pass")
    with pytest.raises(RuntimeError, match=r"could not start.*has no 'f'"):
        prime(scorer)(make_batch(["a"]))


def test_a_setup_error_stops_the_run_under_every_policy(
    prime: Callable[..., PrimeRewardManager], make_batch: MakeBatch
) -> None:
    manager = prime(policy=FailurePolicy("score", 0.0, 60.0), fromat_score=0.1)
    with pytest.raises(ScorerSignatureError, match="fromat_score"):
        manager(make_batch(["#### 1"], "openai/gsm8k", ["1"]))
