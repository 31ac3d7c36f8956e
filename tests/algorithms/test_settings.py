"""Settings come from the config, else from the defaults."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hone.algorithms.settings import config_value, setting
from hone.config.algorithm import AlgorithmConfig


@pytest.mark.parametrize(
    "config",
    [{"a": {"b": 3}}, SimpleNamespace(a=SimpleNamespace(b=3)), SimpleNamespace(a={"b": 3})],
)
def test_dotted_keys_of_dicts_and_objects(config):
    assert setting(config, "a.b", AlgorithmConfig) == 3
    assert config_value(config, "a.b") == 3
    assert config_value(config, "a.c") is None
    assert config_value(None, "a") is None


def test_missing_keys_have_their_defaults():
    assert setting(None, "gamma", AlgorithmConfig) == setting({}, "gamma", AlgorithmConfig) == 1.0
    assert setting({"gamma": None}, "gamma", AlgorithmConfig) is None


def test_the_error_of_an_unknown_key_names_it():
    with pytest.raises(KeyError, match="AlgorithmConfig has the key no_such_key"):
        setting({}, "no_such_key", AlgorithmConfig)
