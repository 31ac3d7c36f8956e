from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.rewards.scores.latex import (
    as_number,
    boxed_answer,
    collection_kind,
    last_boxed_only_string,
    remove_boxed,
    strip_string,
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\fbox{7}", "7"),
        (r"\boxed 7$", "7"),
        (r"\boxed {8}", "8"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{1", None),
        ("no box", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_balanced_box_is_the_answer(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


def test_verls_two_functions_find_and_remove_the_box() -> None:
    assert last_boxed_only_string(r"a \boxed{x{y}z} b") == r"\boxed{x{y}z}"
    assert remove_boxed(r"\boxed{x{y}z}") == "x{y}z"


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (r"\dfrac{1}{2}", r"\frac12"),
        (r"\tfrac1{2}", r"\frac{1}2"),
        ("1/2", r"\frac{1}{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"90^\circ", "90"),
        (r"90^{\circ}", "90"),
        (r"\$5", "5"),
        (r"50\%", "50"),
        (r"5\text{ cm}", "5"),
        (r"\text{east}", "east"),
        ("x = 5", "5"),
        (".5", "0.5"),
        (r"\sqrt3", r"\sqrt{3}"),
        ("10,000", "10000"),
        ("10{,}000", "10000"),
        (r"3\,\text{m}", "3"),
        ("12.", "12"),
        ("1 1/2", "3/2"),
        (r"-1\frac12", "-3/2"),
        (r"\frac 1 2", "1/2"),
        ("10 000", "10000"),
        (r"10,\!000", "10000"),
        (r"5\text{ cm}^2", "5"),
        ("(1, 2)", "(1,2)"),
        ("101_{2}", "101_2"),
    ],
)
def test_spellings_of_one_answer_have_one_normal_form(left: str, right: str) -> None:
    assert strip_string(left) == strip_string(right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("(1,2)", "12"),
        ("1,2", "12"),
        (r"\frac12", "12"),
        ("xyz=5", "5"),
        ("-1/2", "1/2"),
        ("4 2", "42"),
        (r"4\,2", "42"),
        ("4$2", "42"),
        (r"4\text{}2", "42"),
        ("4\n2", "42"),
        ("4. 2", "4.2"),
        ("1, 234", "1234"),
        ("1 1/2", "11/2"),
        ("1 3/2", "13/2"),
        (r"42\text{ or 43}", "42"),
        (r"42\text{ or so}", "42"),
        (r"3\text{ million}", "3"),
    ],
)
def test_different_answers_stay_different(left: str, right: str) -> None:
    assert strip_string(left) != strip_string(right)


@pytest.mark.parametrize(
    ("normal_form", "value"),
    [
        ("0.50", Fraction(1, 2)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        (r"\frac{3}{-4}", Fraction(-3, 4)),
        (r"\frac{1}{0}", None),
        ("1e5", None),
        ("9" * 65, None),
        ("٣", None),
    ],
)
def test_only_plain_numbers_have_a_value(normal_form: str, value: Fraction | None) -> None:
    assert as_number(normal_form) == value


@given(st.text(alphabet=r"\{}boxedfrac12 .,$%^=/", max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_text_has_a_normal_form_and_a_box_is_balanced(text: str) -> None:
    strip_string(text)
    answer = boxed_answer(text)
    if answer is not None:
        assert answer.count("{") == answer.count("}") or "{" not in answer


@pytest.mark.parametrize(
    ("normal_form", "kind"),
    [
        (r"\{1,2\}", "set"),
        (r"\{1\}", "set"),
        ("(1,2)", "tuple"),
        ("(1,2]", "interval"),
        ("[1,2]", "interval"),
        ("1,2", "list"),
        ("(1,2),(3,4)", "list"),
        (r"(1,2)\cup(3,4)", None),
        ("(x+1)(x+2)", None),
        ("(1)", None),
        ("42", None),
        ("", None),
    ],
)
def test_kinds_of_collections(normal_form: str, kind: str | None) -> None:
    assert collection_kind(normal_form) == kind
