"""Evaluates model-written arithmetic without `eval`: integers, + - * /, the sign, and parentheses."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MAX_CHARS = 512
MAX_DEPTH = 32
MAX_DIGITS = 24
MAX_EXPONENT = 64  # of a power, which only `evaluate_like_python` allows
MAX_POWER_BITS = 4096  # of the value of a power

_EXACT_CHARS = re.compile(r"[0-9+\-*/()\s]*", re.ASCII)
_PYTHON_CHARS = re.compile(r"[\d+\-*/().\s]+")
_LONG_SIGN_RUN = re.compile(rf"[-+]\s*(?:[-+]\s*){{{MAX_DEPTH},}}")
_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1},}}")
_OPERATORS: dict[type[ast.operator | ast.unaryop], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


class ExpressionError(ValueError):
    """The text is not a valid expression, or is too large."""


@dataclass(frozen=True)
class Evaluation:
    """The exact value of an expression and the integers written in it, in order."""

    value: Fraction
    numbers: tuple[int, ...]


def evaluate(text: str) -> Evaluation:
    """Returns the exact value of an expression; MAX_CHARS, MAX_DEPTH and MAX_DIGITS limit the time."""
    if len(text) <= 4 * MAX_CHARS:  # a longer text is refused without work
        text = " ".join(text.split())
    has_long_number = len(text) > MAX_DIGITS and _LONG_NUMBER.search(text[:MAX_CHARS])
    if has_long_number or len(text) > MAX_CHARS or not _EXACT_CHARS.fullmatch(text):
        raise ExpressionError(
            f"only integers of at most {MAX_DIGITS} digits and + - * / ( ) are allowed, "
            f"in at most {MAX_CHARS} characters"
        )
    numbers: list[int] = []

    def to_fraction(number: int) -> Fraction:
        numbers.append(number)
        return Fraction(number)

    return Evaluation(_evaluate(text, to_fraction, _OPERATORS), tuple(numbers))


def evaluate_like_python(text: str) -> float:
    """Returns the value that `eval` gives in TinyZero; raises ExpressionError for a huge power."""
    text = text.strip()
    if len(text) > MAX_CHARS or not _PYTHON_CHARS.fullmatch(text):
        raise ExpressionError(
            f"only digits, + - * / ( ) and . are allowed, in at most {MAX_CHARS} characters"
        )
    operators: dict[Any, Callable[..., Any]] = {**_OPERATORS, ast.FloorDiv: operator.floordiv}
    operators |= {ast.UAdd: operator.pos, ast.Pow: _power}
    return _evaluate(text, lambda number: number, operators)


def _evaluate(
    text: str, convert: Callable[..., Any], operators: dict[Any, Callable[..., Any]]
) -> Any:
    """Returns the value of an expression within the limits; `convert` is applied to each number."""
    has_many_brackets = text.count("(") > MAX_DEPTH  # nesting_depth() is slower than count()
    is_deep = len(text) > MAX_DEPTH and (
        _LONG_SIGN_RUN.search(text) or (has_many_brackets and nesting_depth(text) > MAX_DEPTH)
    )
    if is_deep or len(text) > MAX_CHARS:
        raise ExpressionError(f"longer than {MAX_CHARS} characters, or deeper than {MAX_DEPTH}")

    def value_of(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return convert(node.value)
        if isinstance(node, ast.UnaryOp) and type(node.op) in operators:
            return operators[type(node.op)](value_of(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in operators:
            return operators[type(node.op)](value_of(node.left), value_of(node.right))
        raise ExpressionError(f"{type(node).__name__} is not arithmetic")

    try:
        return value_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError) as error:
        raise ExpressionError(str(error)) from error


def nesting_depth(text: str) -> int:
    """Returns the depth of nested brackets of any kind."""
    depth = max_depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        max_depth = max(max_depth, depth)
    return max_depth


def _power(base: float, exponent: float) -> float:
    bits = base.bit_length() if isinstance(base, int) else 64  # a float has 64 bits
    if abs(exponent) > MAX_EXPONENT or bits * abs(exponent) > MAX_POWER_BITS:
        raise ExpressionError("the power is too large")
    value = base**exponent
    if isinstance(value, complex):
        raise ExpressionError("the power is complex")
    return value
