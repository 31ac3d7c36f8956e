"""Sampling parameters: what is refused, and how a loop's mapping is read."""

from __future__ import annotations

from typing import Any

import pytest

from hone.rollout.contract import Sampling, is_driven
from hone.rollout.hf import HFRollout
from hone.rollout.native.engine import NativeRollout


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"temperature": -0.1}, "temperature=-0.1 must be 0"),
        ({"temperature": 1e-40}, "temperature=1e-40 must be 0"),
        ({"temperature": float("nan")}, "temperature=nan must be 0"),
        ({"temperature": float("inf")}, "temperature=inf must be 0"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 must be a 64-bit integer"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be a 64-bit integer"),
        ({"top_k": 2**63}, "top_k=9223372036854775808 must be a 64-bit integer"),
        ({"stop_token_ids": (1, 2**63)}, "stop_token_ids.1.=9223372036854775808"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"min_p": 1.5}, "min_p=1.5"),
        (
            {"stop": ("a", "")},
            "stop=.* at least one character",
        ),  # an empty string would end every response
    ],
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Sampling(**{"max_tokens": 1, "temperature": 1.0, "seed": 0, **wrong})


def test_a_mapping_fills_what_it_leaves_out() -> None:
    assert Sampling.from_mapping({}, max_tokens=9, seed=4) == Sampling(9, 1.0, 4)


def test_names_of_other_engines_are_understood() -> None:
    params = {"max_new_tokens": 5, "top_k": 0, "stop": "x", "logprobs": True, "top_p": None}
    sampling = Sampling.from_mapping({**params, "repetition_penalty": 1.0}, max_tokens=9, seed=4)
    assert sampling == Sampling(5, 1.0, 4, stop=("x",))


def test_one_stop_string_is_not_its_characters() -> None:
    assert Sampling(5, 1.0, 4, stop="end").stop == ("end",)  # type: ignore[arg-type]
    params = {"stop": ["a", "b"], "stop_token_ids": [1, 2]}
    sampling = Sampling.from_mapping(params, max_tokens=9, seed=4)
    assert (sampling.stop, sampling.stop_token_ids) == (("a", "b"), (1, 2))


def test_a_request_never_asks_for_more_than_its_limit() -> None:
    assert Sampling.from_mapping({"max_tokens": 50}, max_tokens=9, seed=0).max_tokens == 9


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="sampling_params has no 'tempertaure'"):
        Sampling.from_mapping({"tempertaure": 1.0}, max_tokens=9, seed=0)
    with pytest.raises(ValueError, match="repetition_penalty"):
        Sampling.from_mapping({"repetition_penalty": 1.1}, max_tokens=9, seed=0)


def test_an_engine_that_decodes_in_drive_is_known_also_behind_a_proxy() -> None:
    class Proxy:
        def __init__(self, engine: Any) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

    for engine in (NativeRollout, HFRollout):
        assert is_driven(Proxy(engine)) == is_driven(engine) == (engine is NativeRollout)


@pytest.mark.parametrize("nothing", [{}, None, {"logit_bias": {}}, {"logit_bias": None, "n": 1}])
def test_sampling_parameters_that_ask_for_nothing_have_no_effect(nothing: Any) -> None:
    plain = Sampling.from_mapping({"top_p": 0.5}, max_tokens=4, seed=1)
    params = {"top_p": 0.5, "presence_penalty": 0.0, "repetition_penalty": 1.0, **(nothing or {})}
    assert Sampling.from_mapping(params, max_tokens=4, seed=1) == plain


@pytest.mark.parametrize("name", ["logit_bias", "presence_penalty", "n"])
def test_sampling_parameters_that_ask_for_something_else_are_refused(name: str) -> None:
    value = {3: 1.0} if name == "logit_bias" else 2
    with pytest.raises(ValueError, match=f"sampling_params has no '{name}'"):
        Sampling.from_mapping({name: value}, max_tokens=4, seed=1)
