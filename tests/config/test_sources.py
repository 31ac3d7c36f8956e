"""Overrides and files as settings with an origin."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.config import ConfigError
from hone.config.sources import flatten, parse_overrides, read_file


def test_overrides_flatten_mappings_and_keep_lists() -> None:
    settings = parse_overrides(["a={b:1,c:[2,3]}", "d.e=x", "f={}"])
    assert [(s.key, s.value) for s in settings] == [
        ("a.b", 1),
        ("a.c", [2, 3]),
        ("d.e", "x"),
        ("f", {}),
    ]


@pytest.mark.parametrize("value", ["~/models/m", "a dir/x (1).parquet", "#5", "50%"])
def test_a_plain_value_outside_the_grammar_is_a_string(value: str) -> None:
    (setting,) = parse_overrides([f"a.b={value}"])
    assert setting.value == value


@pytest.mark.parametrize("text", ["a=[1", "a={b", "a='x", "=3", "a"])
def test_an_argument_that_cannot_be_read_is_explained(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the argument"):
        parse_overrides([text])


@pytest.mark.parametrize("text", ["0.5_5", "2_5", "[1,0.5_5]", "'0.5_5'"])
def test_a_lower_and_an_upper_threshold_are_not_one_number(text: str, tmp_path: Path) -> None:
    """Hydra and YAML read 0.5_5 as 0.55."""
    expected = ["1", "0.5_5"] if text[0] == "[" else text.strip("'")
    (setting,) = parse_overrides([f"a.rs_threshold={text}"])
    file = tmp_path / "x.yaml"
    file.write_text(f"a:\n  rs_threshold: {text}\n  b: 1_0\n")
    for value in (setting.value, read_file(file)[0].value):
        assert [str(v) for v in value] == expected if isinstance(value, list) else value == expected


def test_a_deletion_is_marked() -> None:
    (setting,) = parse_overrides(["~a.b"])
    assert (setting.key, setting.delete) == ("a.b", True)


def test_flatten_joins_dotted_keys_of_a_file() -> None:
    settings = flatten({"a.b": {"c": 1}, "d": None}, "", "x.yaml")
    assert [(s.key, s.value, s.origin) for s in settings] == [
        ("a.b.c", 1, "x.yaml"),
        ("d", None, "x.yaml"),
    ]


@pytest.mark.parametrize(
    "arguments", [["a.b", "=", "3"], ["a.b=", "3"], ["a.b", "=3"], ["a.b", " = 3"], ["a.b =3"]]
)
def test_spaces_around_the_equals_sign_are_named(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"write a\.b=VALUE without spaces around the ="):
        parse_overrides(arguments)


def test_an_empty_value_before_another_key_is_empty() -> None:
    assert [s.value for s in parse_overrides(["a=", "b=3"])] == ["", 3]
