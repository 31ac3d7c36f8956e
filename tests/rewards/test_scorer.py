"""Results of calls of scorers, deadlines, and answers in responses."""

from __future__ import annotations

import asyncio
import math
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest
import torch

from hone.plugins import load_extern_object
from hone.rewards.failures import Failed, FailurePolicy, Scored
from hone.rewards.scorer import (
    DeadlineExceeded,
    ScorerInput,
    all_answers,
    call_with_deadline,
    count_mishap,
    last_answer,
    read_result,
    score_row,
)

ROW = ScorerInput("mine", "text", "truth", {"a": 1})


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (
            "def inner(x):\n    return 1 / x\ndef compute_score(solution_str):\n    return inner(0)",
            2,
        ),
        ("import json\ndef compute_score(solution_str):\n    return json.loads('{')", 3),
        ("def compute_score(solution_str, extra):\n    return 1", 1),
        ("async def compute_score(solution_str):\n    return {}['a']", 2),
    ],
)
def test_the_location_of_a_failure_is_a_line_of_the_user(
    scorer_file: Callable[[str], str], source: str, line: int
) -> None:
    path = scorer_file(source + "\n")
    outcome = score_row(load_extern_object(path, "compute_score"), ROW, {})
    assert isinstance(outcome, Failed)
    assert outcome.detail.startswith(f"compute_score of {path} raised ")
    assert outcome.detail.endswith(f" at {path}:{line}")


def test_a_registered_rule_that_fails_is_named_with_its_line(
    scorer_file: Callable[[str], str],
) -> None:
    from hone.rewards.scores import table

    path = scorer_file("def grade(solution_str):\n    return 1 / 0\n")
    before = table.registered_scores()
    try:
        table.register_score("mine", f"{path}:grade")
        outcome = score_row(table.default_compute_score, ROW, {})
    finally:
        table.restore_scores(before)
    assert isinstance(outcome, Failed)
    assert outcome.detail.endswith(f"ZeroDivisionError: division by zero at {path}:2")


def in_main_thread(call: Callable[[], Any]) -> Any:
    return call()


def in_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


in_both_threads = pytest.mark.parametrize("run_in", [in_main_thread, in_thread])


@in_both_threads
def test_a_call_in_time_returns_its_value(run_in: Callable[[Callable[[], Any]], Any]) -> None:
    assert run_in(lambda: call_with_deadline(lambda: 7, 30)) == 7


@in_both_threads
def test_a_late_call_fails(run_in: Callable[[Callable[[], Any]], Any]) -> None:
    outcome = run_in(lambda: call_with_deadline(lambda: time.sleep(30), 0.1))
    assert outcome == Failed("timeout", "no score after 0.1 s")


@in_both_threads
def test_an_error_of_the_call_is_raised_unchanged(
    run_in: Callable[[Callable[[], Any]], Any],
) -> None:
    with pytest.raises(ZeroDivisionError):
        run_in(lambda: call_with_deadline(lambda: 1 / 0, 30))


def test_a_call_that_swallows_exceptions_is_still_interrupted() -> None:
    def stubborn() -> None:
        while True:
            try:
                time.sleep(30)
            except Exception:
                continue

    outcome = call_with_deadline(stubborn, 0.1)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "timeout"


def test_handler_and_timer_are_restored() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        call_with_deadline(lambda: None, 30)
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_a_signal_that_comes_as_the_call_ends_leaves_no_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler, setitimer = signal.getsignal(signal.SIGALRM), signal.setitimer
    signals = [DeadlineExceeded()]

    def interrupted(timer: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        if seconds == 0 and signals:
            raise signals.pop()
        return setitimer(timer, seconds, interval)

    monkeypatch.setattr(signal, "setitimer", interrupted)
    assert isinstance(call_with_deadline(lambda: None, 30_000), Failed)
    assert signal.getitimer(signal.ITIMER_REAL)[0] < 20_000  # that of the tests, if any
    assert signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.parametrize(
    ("result", "score", "extras"),
    [
        (1, 1.0, {}),
        (True, 1.0, {}),
        (np.float32(0.5), 0.5, {}),
        (np.array([0.5]), 0.5, {}),
        ({"score": torch.tensor([0.5])}, 0.5, {}),
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
    assert "test_scorer.py:" in outcome.detail


async def score_and_text(solution_str: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": extra_info["a"], "text": solution_str}


def test_an_async_scorer_is_awaited_also_inside_a_running_loop() -> None:
    async def inside() -> Scored | Failed:
        return score_row(score_and_text, ROW, {})

    expected = Scored(1.0, {"text": "text"})
    assert score_row(score_and_text, ROW, {}) == expected
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


def test_an_infinite_time_limit_is_no_limit() -> None:
    limit_s = FailurePolicy("score", 0.0, math.inf).timeout_s
    assert call_with_deadline(lambda: 1, limit_s) == 1
    with ThreadPoolExecutor(1) as thread:  # a thread has no timer signal
        assert thread.submit(call_with_deadline, lambda: 1, limit_s).result() == 1
    reader, writer = Pipe()  # as in the processes of the prime manager
    writer.send(1)
    assert reader.poll(limit_s)


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


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> 7 </answer>", "7"),
        ("<answer>a\nb</answer>", "a\nb"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>7</answer> </answer>", "7"),  # a closing tag that nothing opened
        ("</answer> <answer>7</answer></answer></answer>", "7"),
        ("<answer>1</answer> <answer>2", "1"),
        ("<answer></answer>", ""),
        ("<answer>7", None),
        ("7</answer>", None),
        ("</answer><answer>", None),
        ("", None),
    ],
)
def test_the_last_answer_is_that_of_the_last_pair_of_tags(text: str, answer: str | None) -> None:
    assert last_answer(text) == answer
    matches = re.findall("<answer>(.*?)</answer>", text, re.DOTALL)
    assert (matches[-1].strip() if matches else None) == answer
    assert all_answers(text) == [match.strip() for match in matches]
