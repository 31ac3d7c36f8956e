"""Symbolic comparisons run together within a budget, and huge computations are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hone.protocol import DataProto
from hone.rewards.failures import Failed
from hone.rewards.managers.batch import BatchRewardManager
from hone.rewards.managers.prime import PrimeRewardManager
from hone.rewards.managers.rule import NaiveRewardManager
from hone.rewards.scorer import ScorerInput, counted_mishaps
from hone.rewards.scores import math_reward, symbolic
from hone.rewards.scores.symbolic import size_problem

MakeBatch = Callable[..., DataProto]
needs_math_verify = pytest.mark.skipif(not symbolic.is_available(), reason="needs math-verify")

REFUSED = [
    "9^{9^{9^{9}}}",
    "9^{9^9^9}",
    "10^{1000000000}",
    "10^1000000000",
    "((10^{9999})^{9999})^{9999}",
    "100000!",
    r"\binom{1000000}{500000}",
    r"\sum_{k=1}^{10000000} \frac{1}{k^2}",
    r"\prod_{k=1}^{1000000} k",
    "1" * 100,
    "(" * 60 + "x" + ")" * 60,
]
SLOW = [
    r"(x+3)^{999}(x+2)^{999}",
    r"(1+x+y+z+w)^{55}",
    r"\int_0^1 \sin(x^{9}) e^{x^3} \cos(x^5) dx",
    r"+".join(rf"\sin(x^{{{j}}}+7)\cos(y^{{{j}}})" for j in range(2, 14)),
]
ORDINARY = [
    r"x^{2023}",
    r"2^{100}\cdot 3^{50}",
    r"2^{2^{10}}",
    r"\frac{10!}{3!7!}",
    r"\binom{100}{50}",
    r"\sum_{k=1}^{n} k^2",
    r"12345678901234567890",
    r"\sqrt{2+\sqrt{3}}",
]


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "_cache", {})


class Recorder:
    """Replaces the comparison processes: records the comparisons and always fails."""

    def __init__(self, reason: str = "timeout") -> None:
        self.reason = reason
        self.runs: list[tuple[int, float]] = []

    def __call__(self, pairs: Sequence[symbolic.Pair], cpu_s: float) -> list[bool | Failed]:
        self.runs.append((len(pairs), cpu_s))
        return [Failed(self.reason, "")] * len(pairs)

    def counts(self) -> Counter[float]:
        counts: Counter[float] = Counter()
        for count, cpu_s in self.runs:
            counts[cpu_s] += count
        return counts


def install_recorder(monkeypatch: pytest.MonkeyPatch, reason: str = "timeout") -> Recorder:
    recorder = Recorder(reason)
    monkeypatch.setattr(symbolic, "is_available", lambda: True)
    monkeypatch.setattr(symbolic, "_compare_in_pool", recorder)
    return recorder


@pytest.mark.parametrize("text", REFUSED)
def test_expressions_of_huge_numbers_are_refused_before_parsing(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = install_recorder(monkeypatch)
    assert size_problem(text) is not None
    with counted_mishaps() as mishaps:
        assert symbolic.symbolically_equal(text, r"\sqrt{2}") is False
        assert symbolic.symbolically_equal(r"\sqrt{2}", text) is False
    assert recorder.runs == []
    assert mishaps == {"symbolic_refused": 2}


@pytest.mark.parametrize("text", [*ORDINARY, *SLOW])
def test_ordinary_expressions_are_not_refused(text: str) -> None:
    assert size_problem(text) is None


def test_very_long_answers_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = install_recorder(monkeypatch)
    assert symbolic.symbolically_equal("x" * 5000, "x+1") is False
    assert recorder.runs == []


def test_512_hostile_comparisons_have_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = install_recorder(monkeypatch)
    pairs = [(f"x^{{{i}}}", r"\sqrt{y}") for i in range(2, 514)]
    symbolic.compare_all(pairs)
    short, long = symbolic.SHORT_CPU_S, symbolic.LONG_CPU_S
    assert recorder.counts() == {short: 512, long: symbolic.MAX_LONG_COMPARISONS}
    # On two cores, with nothing refused for its size.
    assert (512 * short + symbolic.MAX_LONG_COMPARISONS * long) / 2 < 60
    symbolic.compare_all(pairs)
    with counted_mishaps() as mishaps:
        assert not any(symbolic.symbolically_equal(*pair) for pair in pairs)
    assert sum(recorder.counts().values()) == 512 + symbolic.MAX_LONG_COMPARISONS
    assert mishaps == {"symbolic_timeout": 512}


def test_a_batch_that_crashes_many_processes_ends_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = install_recorder(monkeypatch, "crash")
    symbolic.compare_all([(f"x^{{{i}}}", "y") for i in range(2, 514)])
    assert recorder.counts() == {symbolic.SHORT_CPU_S: 2 * symbolic.MAX_PROCESSES}
    assert len(symbolic._cache) == 512


def test_a_single_comparison_gets_the_long_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = install_recorder(monkeypatch)
    symbolic.compare_all([("x", "y")])
    assert recorder.runs == [(1, symbolic.LONG_CPU_S)]


@pytest.mark.parametrize(
    "manager_class", [NaiveRewardManager, BatchRewardManager, PrimeRewardManager]
)
def test_every_manager_makes_the_comparisons_of_a_batch_together(
    manager_class: Any, tokenizer: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = install_recorder(monkeypatch)
    sources = ["lighteval/MATH", "numina_olympiads", "hiyouga/geometry3k", "openai/gsm8k"] * 3
    texts = [rf"\boxed{{x^{{{i + 2}}}}}" for i in range(12)]
    data = make_batch(texts, sources, [r"\sqrt{y}"] * 12)
    options = {"num_processes": 1} if manager_class is PrimeRewardManager else {}
    manager = manager_class(tokenizer, 0, **options)
    try:
        assert manager(data).sum() == 0.0
        assert manager.pop_metrics() == {"reward/failures/symbolic_timeout": 9.0}
    finally:
        manager.close()
    assert recorder.counts() == {symbolic.SHORT_CPU_S: 9, symbolic.LONG_CPU_S: 9}
    assert len(recorder.runs) == 2


def test_comparisons_of_a_built_in_rule_for_all_rows_are_precomputed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = install_recorder(monkeypatch)
    rows = [ScorerInput("mine", rf"\boxed{{x^{{{i + 2}}}}}", r"\sqrt{y}", {}) for i in range(3)]
    NaiveRewardManager(None, 0, math_reward.compute_score).score_symbolic_rows(rows)
    assert recorder.runs == [(3, symbolic.SHORT_CPU_S), (3, symbolic.LONG_CPU_S)]


def test_a_users_score_function_is_not_called_to_precompute() -> None:
    calls: list[str] = []

    def score(solution_str: str) -> float:
        calls.append(solution_str)
        return 1.0

    row = ScorerInput("lighteval/MATH", "x", "y", {})
    assert NaiveRewardManager(None, 0, score).score_symbolic_rows([row]) == [(None, {})]
    assert calls == []


@pytest.mark.parametrize(
    "manager_class", [NaiveRewardManager, BatchRewardManager, PrimeRewardManager]
)
def test_a_response_without_an_equal_comparison_is_scored_by_one_call(
    manager_class: Any, tokenizer: Any, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    is_equiv = math_reward.is_equiv

    def count(answer: str, truth: str, **options: Any) -> bool:
        calls[answer] += 1
        return is_equiv(answer, truth, **options)

    monkeypatch.setattr(math_reward, "is_equiv", count)
    monkeypatch.setattr(symbolic, "is_available", lambda: True)
    monkeypatch.setattr(
        symbolic, "_compare_in_pool", lambda pairs, cpu_s: [answer == "a^2" for answer, _ in pairs]
    )
    answers = ["a^2", "b^2", "7", "c"]
    data = make_batch(
        [rf"\boxed{{{answer}}}" for answer in answers],
        ["lighteval/MATH"] * 4,
        ["aa", "aa", "7", r"\sqrt{y}"],
    )
    options = {"num_processes": 1} if manager_class is PrimeRewardManager else {}
    manager = manager_class(tokenizer, 0, **options)
    try:
        assert manager(data).sum(-1).tolist() == [1.0, 0.0, 1.0, 0.0]
    finally:
        manager.close()
    in_this_process = 1 if manager_class is PrimeRewardManager else 2
    assert calls == {"a^2": in_this_process, "b^2": 1, "7": 1, "c": 1}


@needs_math_verify
def test_a_slow_comparison_is_interrupted_and_its_process_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hone.rewards import pool

    starts: list[Any] = []
    worker = pool._Worker

    def count_start(*arguments: Any) -> Any:
        starts.append(arguments)
        return worker(*arguments)

    monkeypatch.setattr(pool, "_Worker", count_start)
    monkeypatch.setattr(symbolic, "_pool", None)
    monkeypatch.setattr(symbolic, "num_processes", 1)
    monkeypatch.setattr(symbolic, "LONG_CPU_S", 0.2)
    rows = [
        ScorerInput("lighteval/MATH", rf"\boxed{{{text}}}", r"\sqrt{2}+x", {}) for text in SLOW[:2]
    ]
    rows.append(ScorerInput("lighteval/MATH", r"\boxed{x+\frac{2}{\sqrt{2}}}", r"\sqrt{2}+x", {}))
    try:
        results = [
            list(call.comparisons.values())
            for call in NaiveRewardManager(None, 0).score_symbolic_rows(rows)
        ]
        assert all(isinstance(r, Failed) and r.reason == "timeout" for [r] in results[:-1])
        assert results[-1] == [True]
        assert len(starts) == 1
    finally:
        assert symbolic._pool is not None
        symbolic._pool.close()


def test_a_comparison_that_a_batch_skipped_is_made_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install_recorder(monkeypatch, "crash")
    pairs = [(f"x^{{{i}}}", "y") for i in range(2, 42)]
    symbolic.compare_all(pairs)
    assert symbolic.symbolically_equal(*pairs[-1]) is False
    monkeypatch.setattr(symbolic, "_compare_in_pool", lambda pairs, cpu_s: [True] * len(pairs))
    symbolic.compare_all(pairs)
    assert symbolic.symbolically_equal(*pairs[-1]) is True
    assert symbolic.symbolically_equal(*pairs[0]) is False  # its process crashed
