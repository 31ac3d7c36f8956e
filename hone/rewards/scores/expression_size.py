"""Expressions that are refused unread: a few characters that ask for astronomically large numbers.

A rough measure, by text alone. What it lets through is held by limits of CPU time and memory.
"""

from __future__ import annotations

import re

from hone.rewards.expressions import nesting_depth

MAX_EXPONENT = 9_999
MAX_POWERS = 1_000_000
"""Product of the exponents from 100 on: a power of a power multiplies them."""
MAX_COUNTED = 999
"""Largest number in a factorial, binomial, sum, product, integral or limit."""
MAX_DIGITS = 64
MAX_DEPTH = 40

_NUMBER = re.compile(r"\d+")
_EXPONENT = re.compile(r"\^\s*\{?\s*[+-]?\s*(\d+)")
_TOWER = re.compile(r"\^\s*\{[^{}]*\^\s*\{?[^{}]*\^")
_COUNTING = re.compile(r"!|\\(?:binom|[dt]binom|sum|prod|int|lim|factorial|Gamma|zeta)(?![a-zA-Z])")


def too_large(text: str) -> str | None:
    """Why an expression is not handed to the symbolic check; None when it may be."""
    numbers = [match.group().lstrip("0") for match in _NUMBER.finditer(text)]
    if any(len(number) > MAX_DIGITS for number in numbers):
        return f"a number of more than {MAX_DIGITS} digits"
    powers = 1
    for exponent in _EXPONENT.findall(text):
        value = int(exponent[:20])
        powers *= value if value >= 100 else 1
        if value > MAX_EXPONENT or powers > MAX_POWERS:
            return f"a power of {value}"
    if _TOWER.search(text):
        return "a tower of powers"
    if _COUNTING.search(text) and any(int(number or 0) > MAX_COUNTED for number in numbers):
        return f"a factorial, sum or the like of more than {MAX_COUNTED}"
    return "nested too deeply" if nesting_depth(text) > MAX_DEPTH else None
