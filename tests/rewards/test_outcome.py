from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hone.rewards.calling import count_mishap
from hone.rewards.failures import Failed, FailurePolicy, Scored
from hone.rewards.outcome import ScorerInput, read_result, score_row

ROW = ScorerInput("mine", "text", "truth", {"a": 1})


@pytest.mark.parametrize(
    ("result", "score", "extras"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        (torch.tensor(0.25), 0.25, {}),
        ((0.5, "why"), 0.5, {}),
        (
            {"score": 2, "acc": np.bool_(True), "ids": np.arange(2)},
            2.0,
            {"acc": True, "ids": [0, 1]},
        ),
    ],
)
def test_the_usual_results_are_scores(result: Any, score: float, extras: dict[str, Any]) -> None:
    assert read_result(result) == Scored(score, extras)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (float("nan"), "nan"),
        ({"score": float("nan")}, "nan"),
        (float("inf"), "inf"),
        (None, "bad_return"),
        ("1.0", "bad_return"),
        ({"acc": 1}, "bad_return"),
        ((), "bad_return"),
        (torch.zeros(2), "bad_return"),
        (object(), "bad_return"),
    ],
)
def test_everything_else_is_a_failure_with_its_reason(result: Any, reason: str) -> None:
    outcome = read_result(result)
    assert isinstance(outcome, Failed)
    assert outcome.reason == reason


def test_an_exception_of_a_scorer_is_a_failure_with_its_line() -> None:
    def boom(solution_str: str) -> float:
        raise LookupError("gone")

    outcome = score_row(boom, ROW, {})
    assert isinstance(outcome, Failed)
    assert outcome.reason == "exception"
    assert "boom raised LookupError: gone at" in outcome.detail
    assert "test_outcome.py:" in outcome.detail


async def async_score(solution_str: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": extra_info["a"], "text": solution_str}


def test_an_async_scorer_is_awaited_also_inside_a_running_loop() -> None:
    import asyncio

    async def inside() -> Scored | Failed:
        return score_row(async_score, ROW, {})

    expected = Scored(1.0, {"text": "text"})
    assert score_row(async_score, ROW, {}) == expected
    assert asyncio.run(inside()) == expected


def test_mishaps_inside_a_scorer_are_part_of_its_result() -> None:
    def slow_symbolic(solution_str: str) -> float:
        count_mishap("symbolic_timeout")
        return 0.0

    assert score_row(slow_symbolic, ROW, {}) == Scored(0.0, {}, {"symbolic_timeout": 1})
    assert score_row(lambda solution_str: 0.0, ROW, {}) == Scored(0.0)


@pytest.mark.parametrize(("on_failure", "timeout_s"), [("ignore", 1.0), ("raise", 0.0)])
def test_an_invalid_policy_is_refused(on_failure: str, timeout_s: float) -> None:
    with pytest.raises(ValueError, match=r"reward_model\.reward_kwargs\."):
        FailurePolicy(on_failure, 0.0, timeout_s)


def test_a_number_too_large_for_a_float_is_a_failure() -> None:
    result = read_result(10**400)
    assert isinstance(result, Failed)
    assert result.reason == "inf"


def test_an_object_that_raises_anything_is_a_bad_return() -> None:
    class Odd:
        def __float__(self) -> float:
            raise RuntimeError("no number")

        def __repr__(self) -> str:
            raise RuntimeError("no text")

    result = read_result({"score": Odd()})
    assert isinstance(result, Failed)
    assert result.reason == "bad_return"


def test_the_message_of_an_exception_has_no_control_characters_and_may_itself_fail() -> None:
    def quotes(solution_str: str) -> float:
        raise ValueError(f"cannot read {solution_str}")

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def mute(solution_str: str) -> float:
        raise Mute

    row = ScorerInput("s", "\x1b[2J \ud800", None, {})
    failed, silent = score_row(quotes, row, {}), score_row(mute, row, {})
    assert isinstance(failed, Failed)
    assert isinstance(silent, Failed)
    assert "ValueError: cannot read \\x1b[2J ?" in failed.detail
    assert "Mute" in silent.detail


def test_extras_that_are_nested_too_deeply_fail_the_row() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    outcome = score_row(lambda solution_str: {"score": 1.0, "deep": deep}, ROW, {})
    assert isinstance(outcome, Failed)
    assert "RecursionError" in outcome.detail
