from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.rewards.scores import math_reward, symbolic


@pytest.fixture
def no_symbolic(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(answer: str, truth: str) -> bool:
        raise AssertionError(f"compared {answer!r} and {truth!r}")

    monkeypatch.setattr(math_reward, "symbolically_equal", refuse)


@pytest.mark.usefixtures("no_symbolic")
@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"The solution is \boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"The answer is \boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{0.50}", "1/2", 1.0),
        (r"\boxed{3}", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
        ("4", "4", 0.0),
        (r"\boxed{12}", 12, 1.0),
    ],
)
def test_text_and_numbers_are_compared_without_the_symbolic_check(
    text: str, truth: Any, score: float
) -> None:
    assert math_reward.compute_score(text, truth) == score


@pytest.mark.usefixtures("no_symbolic")
def test_every_reference_solution_of_the_real_set_scores_one(
    shared_rows: Callable[[str], list[dict[str, Any]]],
) -> None:
    rows = shared_rows("math/test.jsonl.gz")
    assert len(rows) == 5000
    wrong = [row for row in rows if math_reward.compute_score(row["solution"], row["answer"]) != 1]
    assert wrong == []


needs_math_verify = pytest.mark.skipif(not symbolic.is_available(), reason="needs math-verify")


@needs_math_verify
@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"x^2+2x+1", "(x+1)^2", True),
        (r"x^2+2x+2", "(x+1)^2", False),
        (r"\{2, 1\}", r"\{1,2\}", True),
        ("[0,1)", "[0,1]", False),
        (r"1\frac12", r"\frac32", True),
    ],
)
def test_symbolic_equality(answer: str, truth: str, equal: bool) -> None:
    assert math_reward.is_equiv(answer, truth) is equal


def test_without_math_verify_one_warning_is_logged_and_text_is_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    symbolic.is_available.cache_clear()
    try:
        assert math_reward.compute_score(r"\boxed{\sqrt{12}}", r"2\sqrt{3}") == 0.0
        assert math_reward.compute_score(r"\boxed{0.5}", r"\frac12") == 1.0
        assert math_reward.compute_score(r"\boxed{\sqrt{12}}", r"2\sqrt{3}") == 0.0
    finally:
        monkeypatch.undo()
        symbolic.is_available.cache_clear()
    assert len([r for r in caplog.records if "hone-rl[math]" in r.message]) == 1
