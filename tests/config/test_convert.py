"""Which values fit a type hint, are converted to it, or are refused."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from hone.config.convert import NoFit, describe_type, fit, show_value, to_plain


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, int, 3),
        ("8", int, 8),
        (3, float, 3.0),
        ("1e-6", float, 1e-6),
        (True, bool, True),
        ("False", bool, False),
        (7, str, "7"),
        (None, int | None, None),
        ("a", Literal["a", "b"], "a"),
        (1e3, int, 1000),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        (["+", "-"], tuple[str, str], ("+", "-")),
        ("a", tuple[str, ...], ("a",)),
        ('["a", "b"]', tuple[str, ...], ("a", "b")),
        ("['a']", tuple[str, ...], ("a",)),
        ("[a", tuple[str, ...], ("[a",)),
        ("[not json]", tuple[str, ...], ("[not json]",)),
        ("all-linear", str | tuple[str, ...], "all-linear"),
        (["q", "v"], str | tuple[str, ...], ("q", "v")),
        (1, str | float, 1.0),
        (0.1, str | float, 0.1),
        ("gamma-decay", str | float, "gamma-decay"),
        ("0.5_2.0", float | str, "0.5_2.0"),
        ({"a": 1}, dict[str, Any], {"a": 1}),
        ("x", Any, "x"),
    ],
)
def test_a_value_that_fits_comes_out_in_the_fields_type(
    value: Any, annotation: Any, expected: Any
) -> None:
    result = fit(value, annotation)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (1.5, int),
        (True, int),
        ("1.5", int),
        (True, float),
        ("fast", float),
        (1, bool),
        (None, int),
        (True, str),
        ([1], str),
        ("c", Literal["a", "b"]),
        (True, Literal[1, 2]),
        (["+"], tuple[str, str]),
        ([None], tuple[str, ...]),
        (None, tuple[str, ...]),
        ([1], dict[str, Any]),
        ([1], int | None),
    ],
)
def test_a_value_that_does_not_fit_is_refused(value: Any, annotation: Any) -> None:
    with pytest.raises(NoFit):
        fit(value, annotation)


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int | None, "an integer or null"),
        (tuple[float, ...], "a list of numbers"),
        (tuple[str, str], "a list of 2 strings"),
        (str | tuple[str, ...], "a string or a list of strings"),
        (Literal["a", "b"], "one of a, b"),
        (dict[str, Any], "a mapping"),
        (Any, "any value"),
        (bool, "true or false"),
    ],
)
def test_a_type_is_described_in_words(annotation: Any, words: str) -> None:
    assert describe_type(annotation) == words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-6, "1e-06"),
        (0.30000000000000004, "0.30000000000000004"),
        ([1, "a"], "[1,a]"),
        ({"a": None}, "{a:null}"),
        ("", "''"),
        ("\n\n", "'\\n\\n'"),
        ("x y", "x y"),
    ],
)
def test_a_value_is_shown_as_on_the_command_line(value: Any, text: str) -> None:
    assert show_value(value) == text


def test_plain_trees_hold_lists_for_tuples() -> None:
    assert to_plain({"a": (1, (2,)), "b": {"c": ()}}) == {"a": [1, [2]], "b": {"c": []}}
