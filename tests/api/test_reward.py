"""A reward in every form that users write becomes one score function."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest

from hone.api.reward import as_score_function, reads_prompt, reward_parts
from hone.api.runs import _RunInputs
from hone.rewards.failures import RewardError, SetupError
from hone.rewards.scorer import ROW_ARGUMENTS, ScorerSignatureError
from hone.rewards.signature import check_signature

EXTRA = {"level": "easy", "prompt": "1+1="}


def score(reward: Any, text: str = "2", answer: Any = "2", extra: dict[str, Any] = EXTRA) -> Any:
    function = as_score_function(reward_parts(reward), extra)
    check_signature(function, ROW_ARGUMENTS, {})
    return function("source", text, answer, extra)


@pytest.mark.parametrize(
    "function",
    [
        lambda completion, answer: completion + answer == "22",
        lambda response, ground_truth: response + ground_truth == "22",
        lambda data_source, solution_str, ground_truth, extra_info: extra_info is EXTRA,
        lambda solution_str, data_source: solution_str + data_source == "2source",
        lambda completion, level: (completion, level) == ("2", "easy"),
        lambda prompt: prompt == "1+1=",
        lambda text: text == "2",
        lambda text, /: text == "2",
        lambda completion, threshold=3: threshold == 3,
        lambda completions, answer, **kwargs: [completions + answer == ["2", "2"]],
        lambda completions, **kwargs: [kwargs["level"] == ["easy"] and kwargs["prompts"] == ["1+1="]],
        lambda completions: [completions == ["2"]],
        lambda completions, scale=2.0, **kwargs: [scale == 2.0 and "scale" not in kwargs],
    ],
)  # fmt: skip
def test_a_function_is_given_what_its_parameters_name(function: Any) -> None:
    assert score(function) == 1


def test_a_row_with_several_answer_columns_keeps_them_apart(tmp_path: Path) -> None:
    row = {"question": "6*7=", "answer": "42", "solution": "6 times 7 is 42"}
    calls: list[Any] = []

    def reward(completion: str, answer: str, solution: str, ground_truth: str) -> float:
        calls.append((completion, answer, solution, ground_truth))
        return 1.0

    scorer = _RunInputs(reward)
    scorer.prepare([row], tmp_path, "rows")
    assert scorer.score_function is not None
    assert scorer.score_function("python", "x", "42", {"solution": row["solution"]}) == 1
    assert calls == [("x", "42", "6 times 7 is 42", "42")]


def test_trls_completions_of_a_chat_prompt_are_messages() -> None:
    chat = [{"role": "user", "content": "1+1="}]
    calls: list[Any] = []
    score(lambda completions: [calls.append(completions) or 1.0], extra={"prompt": chat})
    assert calls == [[[{"role": "assistant", "content": "2"}]]]


def test_several_are_summed_by_weight_and_reported_by_name() -> None:
    def exact(completion: str, answer: str) -> float:
        return float(completion == answer)

    def brief(completion: str) -> dict[str, float]:
        return {"score": -1.0}

    both = {"score": 0.5, "exact": 1.0, "brief": -1.0}
    assert score([exact, (brief, 0.5)]) == both
    assert score({exact: 1.0, brief: 0.5}) == both
    assert score([(exact, 2.0)]) == {"score": 2.0, "exact": 1.0}
    assert score([exact, lambda text: 1.0, lambda text: None]) == {
        "score": 2.0, "exact": 1.0, "lambda": 1.0, "lambda_2": 0.0}  # fmt: skip


def test_a_part_may_have_the_name_of_the_sum() -> None:
    def score_(completion: str, answer: str) -> float:
        return float(completion == answer)

    score_.__name__ = "score"
    both = {"score": 0.5, "score_2": 0.0, "lambda": 1.0}
    assert score([score_, (lambda text: 1.0, 0.5)], answer="3") == both
    assert score([(score_, 3.0)]) == {"score": 3.0}
    assert [part.name for part in reward_parts(score_)] == ["score"]


def test_a_name_is_a_rule_of_the_table() -> None:
    assert score("gsm8k", text="#### 2") == {"score": 1.0, "acc": 1.0}
    assert score({"gsm8k": 0.5}, text="#### 3") == {"score": 0.0, "gsm8k": 0.0}
    with pytest.raises(SetupError, match="gsm8k"):
        reward_parts("gsm9k")


def test_async_functions_are_awaited_together() -> None:
    async def judge(completion: str) -> float:
        await asyncio.sleep(0)
        return 0.25

    function = as_score_function(reward_parts([judge, lambda text: 1.0]), ())
    assert inspect.iscoroutinefunction(function)
    assert asyncio.run(function("s", "2", "2", {})) == {"score": 1.25, "judge": 0.25, "lambda": 1.0}


def test_one_part_that_returns_no_number_is_named() -> None:
    def words(text: str) -> str:
        return "good"

    with pytest.raises(RewardError, match="words: text"):
        score([words, len])


@pytest.mark.parametrize("reward", [3, [3], [(len, "x")], {len: None}])
def test_what_is_no_reward_is_refused(reward: Any) -> None:
    with pytest.raises(ScorerSignatureError, match="a reward is a function"):
        reward_parts(reward)


def test_a_parameter_that_no_row_has_is_named_with_what_there_is() -> None:
    with pytest.raises(ScorerSignatureError, match=r"takes label, which no row has.*level"):
        score(lambda completion, label: 1.0)
    with pytest.raises(ScorerSignatureError, match=r"takes label, which no row has.*prompts"):
        score(lambda completions, label, **kwargs: [1.0])


def test_two_unknown_parameters_are_refused_with_their_line() -> None:
    def reward(gold: str, text: str) -> bool:
        return gold in text

    line = reward.__code__.co_firstlineno
    with pytest.raises(
        ScorerSignatureError, match=rf"test_reward\.py:{line}: .*takes gold, text, which"
    ):
        score(reward)


def test_the_prompt_is_asked_for_by_name_only() -> None:
    assert reads_prompt(reward_parts([len, lambda prompt: 1]))
    assert reads_prompt(reward_parts(lambda completions: [1]))
    assert not reads_prompt(reward_parts([len, "gsm8k"]))
