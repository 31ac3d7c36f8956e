"""Outputs of programs: integers must match exactly, decimals closely, and no text raises."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hone.rewards.programs import is_equal_json, same_output


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3", "1 2 \n3\n\n", True),
        ("1 2 3", "1 2\n3", True),
        ("0.3333333", "0.33333334", True),
        ("0.34", "0.33333334", False),
        ("1", "2", False),
        ("1000001", "1000000", False),
        ("Yes", "YES", False),
        ("", "1", False),
        ("nan", "1.0", False),
        ("inf", "1.0", False),
        ("1_0.5", "10.5", False),
        ("123456800.0", "123456789", False),
        ("9" * 400 + ".0", "1.5", False),
    ],
)
def test_output_is_compared_by_lines_words_and_close_decimals(
    output: str, expected: str, same: bool
) -> None:
    assert same_output(output, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (123456800.0, 123456789, False),
        (1000000500.0, 1000000007, False),
        (3.0, 3, True),
        (3.0000001, 3, False),
        (3, 3.0, True),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        (True, 1, False),
        (1, True, False),
        (10**400, 1.5, False),
        (1.5, 10**400, False),
        (math.inf, 1.5, False),
        (math.inf, math.inf, True),
        (math.nan, math.nan, True),
        ([1.0, [2]], [1, [2]], True),
        ([123456800.0], [123456789], False),
        ({"a": [0.1 + 0.2]}, {"a": [0.3]}, True),
        ({"a": 123456800.0}, {"a": 123456789}, False),
        ({"a": 1}, {"b": 1}, False),
        ("3", 3, False),
        (None, 0, False),
    ],
)
def test_values_are_equal_or_close_decimals(value: Any, expected: Any, same: bool) -> None:
    assert is_equal_json(json.dumps(value), expected) is same


@pytest.mark.parametrize("text", ["", "x", "[" * 100_000, "9" * 100_000, "{1: 2}", "\ud800", "NaN"])
def test_text_that_is_not_json_of_the_value_is_wrong(text: str) -> None:
    assert not is_equal_json(text, 3)
    assert not is_equal_json(text, [[]])
