from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.rewards.expressions import (
    MAX_CHARS,
    MAX_DEPTH,
    ExpressionError,
    evaluate,
    evaluate_like_python,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2*3*4", 24),
        ("(1 + 2) / 3", 1),
        ("1/3", Fraction(1, 3)),
        ("8/(3-8/3)", 24),
        ("-2*-3", 6),
        ("2 - -3", 5),
        (" 7\n", 7),
        ("10-4-3", 3),
        ("12/2/3", 2),
        ("0", 0),
    ],
)
def test_the_value_is_exact(text: str, value: Fraction) -> None:
    assert evaluate(text).value == value


def test_numbers_are_returned_in_order() -> None:
    assert evaluate("(44 + 19) * 35 - 44").numbers == (44, 19, 35, 44)


@pytest.mark.parametrize(
    "text",
    [
        "2**3",
        "7//2",
        "2* *3",
        "+3",
        "2.0",
        "1_000",
        "007",
        "(2)(3)",
        "2 3",
        "(2",
        "2)",
        "",
        "  ",
        "2*",
        "1/0",
        "1/(2-2)",
        "x",
        "__import__('os')",
        "2=2",
        "٣+1",
        "1e5",
        "2%1",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)


@pytest.mark.parametrize(
    "text",
    [
        "(" * 100_000 + "1" + ")" * 100_000,
        "(" * (MAX_DEPTH + 2) + "1" + ")" * (MAX_DEPTH + 2),
        "-" * 400 + "1",
        "9" * 100_000,
        "9" * 100,
        "1+" * 100_000 + "1",
    ],
)
def test_hostile_text_is_refused_before_any_arithmetic(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text)
    with pytest.raises(ExpressionError):
        evaluate_like_python("2**" + text)


expressions = st.recursive(
    st.integers(0, 999).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join),
        inner.map(lambda e: f"({e})"),
        inner.map(lambda e: f"-{e}"),
        st.tuples(inner, st.sampled_from(["+", " - ", " *", "/ "]), inner).map("".join),
    ),
    max_leaves=12,
)


def fraction_of(node: ast.expr) -> Fraction:
    """A slow reference: Python's parser with exact fractions."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp):
        assert isinstance(node.op, ast.USub)
        return -fraction_of(node.operand)
    assert isinstance(node, ast.BinOp)
    left, right = fraction_of(node.left), fraction_of(node.right)
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    if isinstance(node.op, ast.Mult):
        return left * right
    assert isinstance(node.op, ast.Div)
    return left / right


@given(expressions)
@settings(max_examples=300, deadline=None)
def test_values_are_those_of_pythons_grammar(text: str) -> None:
    try:
        expected = fraction_of(ast.parse(text, mode="eval").body)
    except ZeroDivisionError:
        with pytest.raises(ExpressionError):
            evaluate(text)
        return
    if len(text) <= MAX_CHARS:
        assert evaluate(text).value == expected


@given(st.text(alphabet="0123456789+-*/() \n", max_size=24))
@settings(max_examples=500, deadline=None)
def test_any_text_has_the_value_that_python_gives_it_or_is_refused(text: str) -> None:
    try:
        # A line break inside is white space here; to Python it would end the expression.
        expected = fraction_of(ast.parse(text.replace("\n", " ").strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, AssertionError, ValueError):
        expected = None
    try:
        value = evaluate(text).value
    except ExpressionError:
        value = None
    assert value == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [("2**3*3", 24), ("49//2*1", 24), ("4.5*2", 9.0), ("+3", 3), ("2**-1", 0.5), ("7/2", 3.5)],
)
def test_compat_evaluates_what_tinyzero_accepts(text: str, value: float) -> None:
    assert evaluate_like_python(text) == value


@pytest.mark.parametrize(
    "text", ["(2)(3)", "1/0", "2 = 2", "", "9**9**9", "10**100000", "(-1)**0.5", "[1]", "()"]
)
def test_compat_refuses_calls_errors_and_huge_powers(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate_like_python(text)


@pytest.mark.parametrize("evaluator", [evaluate, evaluate_like_python])
def test_text_after_many_blanks_is_not_ignored(evaluator: Callable[[str], object]) -> None:
    with pytest.raises(ExpressionError):
        evaluator("1" + " " * 600 + "+True")
