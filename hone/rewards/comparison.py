"""Whether what a program printed or returned is what a test expects.

An integer truth is met exactly; a decimal one within a tolerance. Whatever the program wrote, the answer
is yes or no, never an exception.
"""

from __future__ import annotations

import json
import math

from hone.types import JsonValue

_TOLERANCE = 1e-6  # relative to the truth, absolute below 1


def same_output(given: str, expected: str) -> bool:
    """Equal line by line less surrounding space, or word by word with a tolerance for decimals."""
    lines, wanted = _lines(given), _lines(expected)
    if lines == wanted:
        return True
    words, wanted_words = " ".join(lines).split(), " ".join(wanted).split()
    return len(words) == len(wanted_words) and all(map(_same_word, words, wanted_words))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if "." not in wanted and "e" not in wanted.lower():
        return False
    if "_" in word:  # float() takes 1_000; no output format does
        return False
    try:
        return _close(float(word), float(wanted))
    except ValueError:
        return False


def is_json_of(text: str, expected: JsonValue) -> bool:
    """Whether this is JSON of the expected value. Text that is no JSON, or too deep, is not."""
    try:
        return _same_value(json.loads(text), expected)
    except (ValueError, RecursionError):
        return False


def _same_value(value: JsonValue, expected: JsonValue) -> bool:
    if isinstance(value, bool) != isinstance(expected, bool):
        return False
    if isinstance(value, (int, float)) and isinstance(expected, float):
        return _close(value, expected)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            _same_value(value[key], expected[key]) for key in expected
        )
    return bool(value == expected)


def _close(value: float, target: float) -> bool:
    """Within the tolerance of a decimal truth; infinities and NaN only when they are the truth."""
    try:
        value = float(value)
    except OverflowError:
        return False
    if not (math.isfinite(value) and math.isfinite(target)):
        return value == target or (math.isnan(value) and math.isnan(target))
    return abs(value - target) <= _TOLERANCE * max(1.0, abs(target))
