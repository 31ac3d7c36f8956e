"""Arithmetic written by a model, evaluated without `eval`: + - * /, unary minus, parentheses, ints.

Values are exact fractions. Text that is long, deep or holds long numbers is refused before any
arithmetic happens. `evaluate_compat` is the wider, float language that TinyZero's `eval` accepted.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 512
MAX_DEPTH = 32
MAX_DIGITS = 24
MAX_COMPAT_EXPONENT = 64
MAX_COMPAT_BITS = 4096

_TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))", re.ASCII)


class ExpressionError(ValueError):
    """The text is not an expression of the small language, or it is unreasonably large."""


@dataclass(frozen=True)
class Evaluated:
    """The exact value of an expression and the integers written in it, in order."""

    value: Fraction
    numbers: tuple[int, ...]


def evaluate(text: str) -> Evaluated:
    """Value of `text`, or ExpressionError. Time is bounded by MAX_CHARS, MAX_DEPTH, MAX_DIGITS."""
    parser = _Parser(_tokens(text))
    value = parser.sum(0)
    if parser.position != len(parser.tokens):
        raise ExpressionError(f"unexpected {parser.tokens[parser.position]!r}")
    return Evaluated(value, tuple(parser.numbers))


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"longer than {MAX_CHARS} characters")
    text = text.rstrip()
    tokens: list[str] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(
                f"unexpected text at {position}: {text[position : position + 8]!r}"
            )
        tokens.append(match.group(1) or match.group(2))
        position = match.end()
    if not tokens:
        raise ExpressionError("empty expression")
    return tokens


class _Parser:
    """Recursive descent; `depth` counts parentheses and signs so that nesting is bounded."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0
        self.numbers: list[int] = []

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while self.peek() in ("+", "-"):
            sign = self.take()
            right = self.product(depth)
            value = value + right if sign == "+" else value - right
        return value

    def product(self, depth: int) -> Fraction:
        value = self.factor(depth)
        while self.peek() in ("*", "/"):
            sign = self.take()
            right = self.factor(depth)
            if sign == "/" and right == 0:
                raise ExpressionError("division by zero")
            value = value * right if sign == "*" else value / right
        return value

    def factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
        token = self.take()
        if token == "-":
            return -self.factor(depth + 1)
        if token == "(":
            value = self.sum(depth + 1)
            if self.take() != ")":
                raise ExpressionError("expected ')'")
            return value
        return Fraction(self.number(token))

    def number(self, token: str) -> int:
        if not token.isdigit():
            raise ExpressionError(f"expected a number, got {token!r}")
        if len(token) > MAX_DIGITS:
            raise ExpressionError(f"a number of {len(token)} digits")
        if len(token) > 1 and token[0] == "0" and token.strip("0"):
            raise ExpressionError(f"leading zero in {token!r}")
        self.numbers.append(int(token))
        return self.numbers[-1]

    def peek(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> str:
        token = self.peek()
        if token is None:
            raise ExpressionError("expression ends early")
        self.position += 1
        return token


_COMPAT_CHARS = re.compile(r"[\d+\-*/().\s]+")
_COMPAT_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}


def evaluate_compat(text: str) -> float:
    """What upstream's whitelisted `eval` gave: floats, `**`, `//` too. Huge powers are refused."""
    if len(text) > MAX_CHARS or text.count("(") > MAX_DEPTH or not _COMPAT_CHARS.fullmatch(text):
        raise ExpressionError("not in the whitelist of characters, or too large")
    if re.search(rf"[-+]\s*(?:[-+]\s*){{{MAX_DEPTH},}}", text):
        raise ExpressionError(f"more than {MAX_DEPTH} signs in a row")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return _compat_value(tree.body)
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError) as error:
        raise ExpressionError(str(error)) from error


def _compat_value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        operand = _compat_value(node.operand)
        return -operand if isinstance(node.op, ast.USub) else operand
    if isinstance(node, ast.BinOp):
        left, right = _compat_value(node.left), _compat_value(node.right)
        if isinstance(node.op, ast.Pow):
            return _compat_power(left, right)
        if type(node.op) in _COMPAT_OPERATORS:
            return _COMPAT_OPERATORS[type(node.op)](left, right)
    raise ExpressionError(f"{type(node).__name__} is not arithmetic")


def _compat_power(base: float, exponent: float) -> float:
    bits = base.bit_length() if isinstance(base, int) else 64
    if abs(exponent) > MAX_COMPAT_EXPONENT or bits * abs(exponent) > MAX_COMPAT_BITS:
        raise ExpressionError("a power this large is refused")
    value = base**exponent
    if isinstance(value, complex):
        raise ExpressionError("a complex power")
    return value
