r"""Wrong answers must score nothing and right ones everything, under every rule.

Each rule reads one answer: the last box, the last `Answer:`, the number after the last `####`, or
the last `<answer>`. Two answers there are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hone.rewards.scores import (
    arithmetic,
    countdown,
    default_compute_score,
    geo3k,
    gsm8k,
    math_dapo,
    math_reward,
    prime_math,
    qa_em,
    symbolic,
)

Rule = Callable[[str, Any], bool]


def boxed(answer: str) -> str:
    return rf"so \boxed{{{answer}}}"


BOXED: dict[str, Rule] = {
    "math": lambda answer, truth: math_reward.compute_score(boxed(answer), truth) == 1.0,
    "numina": lambda answer, truth: prime_math.compute_score(boxed(answer), truth)[0],
    "numina in words": lambda answer, truth: prime_math.compute_score(
        f"The answer is {answer}", truth
    )[0],
    "dapo": lambda answer, truth: math_dapo.compute_score(f"Answer: {answer}", truth)["acc"],
    "dapo boxed": lambda answer, truth: math_dapo.compute_score(boxed(answer), truth)["acc"],
    "geometry3k": lambda answer, truth: geo3k.acc_reward(boxed(answer), truth) == 1.0,
}
INTEGERS: dict[str, Rule] = {
    **BOXED,
    "gsm8k": lambda answer, truth: gsm8k.compute_score(f"#### {answer}", truth) == 1.0,
    "gsm8k flexible": lambda answer, truth: (
        gsm8k.compute_score(f"it is {answer}", truth, method="flexible") == 1.0
    ),
    "arithmetic": lambda answer, truth: (
        arithmetic.compute_score(f"<answer>{answer}</answer>", truth) == 1.0
    ),
    "qa": lambda answer, truth: qa_em.compute_score(f"<answer>{answer}</answer>", truth) == 1.0,
}

WRONG = [
    ("12345.0", "12346"),
    ("2023.1", "2023"),
    ("2023", "2023.1"),
    ("100000.0", "100009"),
    ("100009", "100000.5"),
    ("123456800.0", "123456789"),
    ("20001.0", r"\frac{40001}{2}"),
    (r"42\%", "0.42"),
    (r"42\%", "4200"),
    ("0.42", r"42\%"),
    ("1 1/2", "11/2"),
    ("1 1/2", "1"),
    (r"1\frac{1}{2}", "11/2"),
    ("4 2", "42"),
    (r"4\,2", "42"),
    (r"4\quad 2", "42"),
    (r"4\text{}2", "42"),
    ("-42", "42"),
    ("42_8", "42"),
    ("42", "42_8"),
    (r"42\text{ or 43}", "42"),
    (r"42\text{ or so}", "42"),
    (r"42\text{ or }43", "42"),
    (r"3\text{ million}", "3"),
    ("42 or 43", "42"),
    ("42 or 43", "43"),
    ("42 and 43", "42"),
    ("42, 43", "42"),
    ("42, 43", "43"),
    ("42;43", "42"),
    ("42/43", "42"),
    ("[42,43]", "42"),
    ("42 43", "43"),
    ("", "42"),
    (" ", "42"),
    (r"\text{}", "42"),
    ("42", ""),
    ("42", "[INVALID]"),
]
SYMBOLIC_WRONG = [
    (r"\{1,2\}", "(1,2)"),
    ("(1,2)", r"\{1,2\}"),
    ("(2,1)", "(1,2)"),
    ("2,1", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("[1,2]", r"\{1,2\}"),
    (r"\pm 42", "42"),
    (r"42 \pm 1", "42"),
    ("42!", "42"),
    ("42 + 10^{-9}", "42"),
    (r"\sqrt{152399025.0001}", "12345"),
    (r"\sqrt{4}\%", "0.02"),
    ("4 2", "6"),
    ("42_{8}", "42"),
    ("101_2", "101_3"),
    ("4'2", "42"),
    (r"\cancel{43} 42", "43"),
    (r"42 \lor 43", "42"),
    (r"\begin{cases}42\\43\end{cases}", "42"),
]
RIGHT = [
    ("42", "42"),
    (" 42 ", "42"),
    ("42.0", "42"),
    ("+42", "42"),
    ("1,234", "1234"),
    (r"10{,}000", "10000"),
    (r"10\,000", "10000"),
    ("1 1/2", "1.5"),
    (r"-1\frac{1}{2}", "-3/2"),
    (r"\frac{84}{2}", "42"),
    (r"50\%", "50"),
    ("50", r"50\%"),
    (r"5\text{ cm}", "5"),
    (r"5\text{ cm}^2", "5"),
    ("(1, 2)", "(1,2)"),
    ("x=5", "5"),
    (r"90^\circ", "90"),
    (r"\$5.00", "5"),
]
SYMBOLIC_RIGHT = [
    (r"\{2,1\}", r"\{1,2\}"),
    ("2,1", "1,2"),
    ("1,2", r"\{2,1\}"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"x=1\text{ or }x=2", "1,2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
]
needs_math_verify = pytest.mark.skipif(not symbolic.is_available(), reason="needs math-verify")


@pytest.fixture
def no_symbolic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only text and numbers are compared, as without math-verify."""
    monkeypatch.setattr(math_reward, "symbolically_equal", lambda answer, truth: False)


@pytest.mark.parametrize("rule", BOXED)
@pytest.mark.parametrize(("answer", "truth"), WRONG)
def test_a_wrong_answer_is_wrong_under_every_rule(
    rule: str, answer: str, truth: str, no_symbolic: None
) -> None:
    assert not BOXED[rule](answer, truth)


@pytest.mark.parametrize("rule", BOXED)
@pytest.mark.parametrize(("answer", "truth"), RIGHT)
def test_a_right_answer_is_right_under_every_rule(
    rule: str, answer: str, truth: str, no_symbolic: None
) -> None:
    assert BOXED[rule](answer, truth)


@needs_math_verify
def test_the_symbolic_check_accepts_only_right_answers() -> None:
    rules = ("math", "numina", "geometry3k")
    accepted = [
        (rule, answer, truth)
        for answer, truth in WRONG + SYMBOLIC_WRONG
        for rule in rules
        if BOXED[rule](answer, truth)
    ]
    assert accepted == []
    rejected = [
        (rule, answer, truth)
        for answer, truth in RIGHT + SYMBOLIC_RIGHT
        for rule in rules
        if not BOXED[rule](answer, truth)
    ]
    assert rejected == []


SPELLINGS: list[Callable[[int], str]] = [
    str,
    "{:,}".format,
    "{}.0".format,
    "{}.00".format,
    " {} ".format,
    "${}$".format,
    r"{}\%".format,
    r"{}\text{{ cm}}".format,
    r"\frac{{{}}}{{1}}".format,
    "x={}".format,
]


@given(
    st.integers(-(10**12), 10**12),
    st.integers(-(10**12), 10**12) | st.integers(-20, 20),
    st.sampled_from(SPELLINGS),
    st.sampled_from(SPELLINGS[:4]),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_no_spelling_of_an_integer_equals_another_integer(
    a: int,
    b: int,
    spell: Callable[[int], str],
    spell_truth: Callable[[int], str],
    is_near: bool,
) -> None:
    b = a + b if is_near else b
    assume(a != b)
    for name, rule in INTEGERS.items():
        truth: Any = b if name == "arithmetic" else spell_truth(b)
        # Numbers are compared without the symbolic check.
        assert not rule(spell(a), truth), name


@given(st.integers(-(10**9), 10**9))
@settings(max_examples=100, deadline=None)
def test_every_integer_equals_itself(a: int) -> None:
    for name, rule in INTEGERS.items():
        assert rule(str(a), str(a)), name
    for spell in SPELLINGS:
        assert BOXED["math"](spell(a), str(a))


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from([" or ", ", ", " and ", "; "]))
@settings(max_examples=100, deadline=None)
def test_two_answers_in_one_place_are_wrong(a: int, b: int, between: str) -> None:
    assume(a != b)
    two_answers = f"{a}{between}{b}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(math_reward, "symbolically_equal", lambda answer, truth: False)
        for name, rule in {**BOXED, "arithmetic": INTEGERS["arithmetic"]}.items():
            assert not rule(two_answers, str(a)), name
            assert not rule(two_answers, str(b)), name
        for rule in INTEGERS.values():
            assert not (rule(two_answers, str(a)) and rule(two_answers, str(b)))


def test_the_last_box_is_the_answer() -> None:
    text = r"\boxed{42} \boxed{43}"
    assert math_reward.compute_score(text, "43") == 1.0
    assert math_reward.compute_score(text, "42") == 0.0
    assert prime_math.compute_score(text, "42")[0] is False
    assert math_dapo.compute_score(text, "42")["acc"] is False


@pytest.mark.parametrize("truth", ["", " ", "[INVALID]", [], {"target": []}, {"target": [""]}])
@pytest.mark.parametrize("source", ["openai/gsm8k", "lighteval/MATH", "math_dapo", "nq", "aime24"])
@pytest.mark.parametrize(
    "text", ["#### ,", "", r"\boxed{}", "Answer: [INVALID]", "<answer></answer>"]
)
def test_an_empty_ground_truth_is_an_error(source: str, text: str, truth: Any) -> None:
    with pytest.raises(ValueError, match=r"ground_truth is .*reward_model\.ground_truth"):
        default_compute_score(source, text, truth)


@pytest.mark.parametrize(
    ("text", "truth"),
    [("#### ,", ""), ("#### .", "."), ("#### ,,", ",,"), ("#### -", "-"), ("#### 4,2", "42")],
)
def test_gsm8k_needs_a_number(text: str, truth: str) -> None:
    assert gsm8k.compute_score(text, truth) == 0.0
    assert gsm8k.compute_score(text, truth, method="flexible") == 0.0


@pytest.mark.parametrize("truth", [24.5, "24.5", "x", None])
def test_a_target_that_is_not_an_integer_is_an_error(truth: Any) -> None:
    with pytest.raises(ValueError, match="must be an integer"):
        countdown.compute_score("<answer>24</answer>", {"target": truth, "numbers": [24]})
    with pytest.raises(ValueError, match="must be an integer"):
        arithmetic.compute_score("<answer>24</answer>", truth)


COUNTDOWN_WRONG = [
    "2*3*4*1",
    "24",
    "2*3*4=24",
    "(2*3*4",
    "2**3*3",
    "2*3*4 or 2+3+4",
    "2*3*4, 24",
    "23+4-3",
    "2*3*4.0",
    "２*3*4",
    "4!",
    "",
    "2*3*4//1",
    "--2*3*4*1",
    "__import__('os')",
]


@pytest.mark.parametrize("answer", COUNTDOWN_WRONG)
def test_countdown_allows_each_number_once_and_nothing_else(answer: str) -> None:
    truth = {"target": 24, "numbers": [2, 3, 4]}
    assert countdown.compute_score(f"<answer>{answer}</answer>", truth) < 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("Rome or Paris", "Paris"),
        ("Paris, Rome", "Paris"),
        ("", "Paris"),
        ("the", "a"),
        ("...", ""),
    ],
)
def test_an_open_question_has_one_answer(answer: str, truth: str) -> None:
    assert qa_em.compute_score(f"<answer>{answer}</answer>", truth) == 0.0
