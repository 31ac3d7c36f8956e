"""Command lines: options and overrides apart."""

from __future__ import annotations

import pytest

from hone.config import ConfigError
from hone.config.sources import flatten, parse_arguments, parse_overrides


@pytest.mark.parametrize(
    "argv",
    [
        ["--config-path=conf", "--config-name=mine", "a.b=1"],
        ["--config-path", "conf", "a.b=1", "--config-name", "mine"],
        ["-cp", "conf", "-cn", "mine", "a.b=1"],
        ["a.b=1", "--config-dir=conf", "-cn=mine"],
    ],
)
def test_config_options_are_taken_from_anywhere(argv: list[str]) -> None:
    assert parse_arguments(argv) == (["a.b=1"], "mine", "conf")


def test_without_options_everything_is_an_override() -> None:
    assert parse_arguments(["a=1", "+b=2"]) == (["a=1", "+b=2"], None, None)


def test_an_unknown_option_is_explained() -> None:
    with pytest.raises(ConfigError, match="unknown option --config-pth. Did you mean '--config-path'"):
        parse_arguments(["--config-pth=x"])


def test_an_option_without_a_value_is_explained() -> None:
    with pytest.raises(ConfigError, match="--config-name needs a value"):
        parse_arguments(["--config-name"])


def test_overrides_flatten_mappings_and_keep_lists() -> None:
    settings = parse_overrides(["a={b:1,c:[2,3]}", "d.e=x", "f={}"])
    assert [(s.key, s.value) for s in settings] == [("a.b", 1), ("a.c", [2, 3]), ("d.e", "x"), ("f", {})]


def test_a_deletion_is_marked() -> None:
    (setting,) = parse_overrides(["~a.b"])
    assert (setting.key, setting.delete) == ("a.b", True)


def test_flatten_joins_dotted_keys_of_a_file() -> None:
    settings = flatten({"a.b": {"c": 1}, "d": None}, "", "x.yaml")
    assert [(s.key, s.value, s.origin) for s in settings] == [("a.b.c", 1, "x.yaml"), ("d", None, "x.yaml")]
