from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.rewards.scores import math_reward, prime_math, symbolic


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


WRONG_CHAINS = (
    (r"x=40\lor x=41\lor x=42", "42"),
    (r"41\lor 42", "42"),
    (r"x=41\quad x=42", "42"),
    (r"a=41\ b=42", "42"),
    (r"x=41\implies x=42", "42"),
    (r"41=x=42", "42"),
    ("6=5", "5"),
    (r"42\equiv 41", "41"),
    (r"42\equiv 41", "42"),
    (r"41\approx 42", "41"),
    (r"41\approx 42", "42"),
    ("5=5", "2=2"),
    (r"2\text{ or }3", "(2,3)"),
    *((rf"42\text{{{words}}}", "42") for words in (
        " k", " lakh", " negative", " double", ", forty-three", " or forty-three")),
)  # fmt: skip


@pytest.mark.parametrize(("answer", "truth"), WRONG_CHAINS)
def test_a_chain_or_an_unknown_multiple_is_not_credited_by_its_last_member(
    answer: str, truth: str
) -> None:
    assert not math_reward.is_equiv(answer, truth)
    assert not prime_math.grade_answer(answer, truth)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"x=6\cdot 7=42", "42"),
        (r"\text{area}=42", "42"),
        (r"f(41)=42", "42"),  # a name for the value
        (r"\angle ABC=42", "42"),
        (r"\sum_{i=1}^{3} i", "6"),
        (r"x=2\text{ or }x=3", "2,3"),
        ("y=3+2x", "y=2x+3"),
        (r"42\text{ K}", "42"),
        (r"42\text{ km}", "42"),
    ],
)
def test_an_equation_whose_sides_are_right_is_credited(answer: str, truth: str) -> None:
    assert math_reward.is_equiv(answer, truth)
