from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest

from hone.plugins import load_extern_object
from hone.rewards.scorer import (
    BATCH_ARGUMENTS,
    ROW_ARGUMENTS,
    ScorerInput,
    ScorerSignatureError,
    call_scorer,
)
from hone.rewards.signature import check_signature

ROW = ScorerInput("mine", "text", "truth", {"a": 1})


def plain(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    return 1.0


async def async_score(solution_str: str, ground_truth: Any) -> float:
    await asyncio.sleep(0)
    return 1.0


def any_keywords(**keywords: Any) -> float:
    return 1.0


def weighted(solution_str: str, weight: float) -> float:
    return weight


class Judge:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, solution_str: str, ground_truth: Any) -> float:
        return 1.0

    def method(self, solution_str: str) -> float:
        return 1.0


@functools.wraps(plain)
def wrapped(*args: Any, **kwargs: Any) -> float:
    return plain(*args, **kwargs)


@pytest.mark.parametrize(
    "function",
    [
        plain,
        async_score,
        any_keywords,
        Judge(),
        Judge().method,
        wrapped,
        functools.partial(weighted, weight=1.0),
        lambda solution_str: 1.0,
    ],
)
def test_every_usual_form_of_a_score_function_can_be_called(function: Callable[..., Any]) -> None:
    check_signature(function, ROW_ARGUMENTS, {})
    assert call_scorer(function, ROW.arguments(), {}) == 1.0


def test_a_builtin_without_a_signature_is_accepted() -> None:
    check_signature(max, ROW_ARGUMENTS, {})


@pytest.mark.parametrize(
    ("source", "message_part"),
    [
        ("def compute_score(prompt, completion): return 1", "'prompt'.*TRL reward function"),
        ("def compute_score(completions, **kwargs): return [1]", "'completions'.*TRL reward"),
        ("def compute_score(solution_strs): return [1]", "reward_model.reward_manager=batch"),
        ("def compute_score(text, truth): return 1", r"missing a required argument: 'text'\)"),
        ("def compute_score(solution_str, weight): return 1", r"'weight'"),
        ("def compute_score(*args): return 1", "it takes none of these"),
        ("def compute_score(): return 1", "it takes none of these"),
        ("async def compute_score(prompt): return 1", "'prompt'"),
    ],
)
def test_a_wrong_signature_is_an_error_with_file_line_and_expected_signature(
    scorer_file: Callable[[str], str], source: str, message_part: str
) -> None:
    path = scorer_file("\n\n" + source + "\n")
    function = load_extern_object(path, "compute_score")
    with pytest.raises(ScorerSignatureError, match=message_part) as caught:
        check_signature(function, ROW_ARGUMENTS, {})
    message = str(caught.value)
    assert "def compute_score(data_source, solution_str, ground_truth, extra_info=None)" in message
    assert message.startswith(f"{path}:3: the score function compute_score(")
    assert "hone_extern" not in message


def test_a_row_function_for_the_batch_manager_is_an_error() -> None:
    with pytest.raises(ScorerSignatureError, match=r"one by one by .*reward_manager=naive"):
        check_signature(plain, BATCH_ARGUMENTS, {})
    check_signature(lambda solution_strs: [1.0], BATCH_ARGUMENTS, {})


def test_a_value_that_is_not_callable_is_an_error() -> None:
    with pytest.raises(ScorerSignatureError, match="cannot be called"):
        check_signature(3, ROW_ARGUMENTS, {})  # type: ignore[arg-type]
