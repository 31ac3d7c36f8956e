"""LoRA adapters that SGLang gets without base weights, and the arguments of a launched server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from hone.models.policy import PolicyModel
from hone.rollout.server_build import lora_server_arguments, peft_model_for_adapters
from hone.rollout.sglang_process import command_and_environment
from hone.verl.dialect import load_config

from .fake_sglang.sglang.launch_server import parser
from .models import policy
from .test_build import spec_of


def peft_model(**settings: Any) -> Any:
    config: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"], **settings}
    return get_peft_model(policy().lm, LoraConfig(**config))


@pytest.mark.parametrize(
    ("settings", "is_alone"),
    [
        ({}, True),
        ({"target_modules": "all-linear"}, True),
        ({"target_modules": r".*\.q_proj"}, False),
        ({"use_rslora": True}, False),
        ({"rank_pattern": {"q_proj": 2}}, False),
        ({"alpha_pattern": {"q_proj": 2}}, False),
        ({"init_lora_weights": "pissa"}, False),
        ({"lora_bias": True}, False),
        ({"bias": "all"}, False),
    ],
    ids=str,
)
def test_an_adapter_goes_alone_only_if_sglang_applies_it_as_it_is(
    settings: dict[str, Any], is_alone: bool
) -> None:
    lm = peft_model(**settings)
    spec = replace(spec_of("hf"), has_adapters=True, load_policy=lambda: PolicyModel(lm))
    assert peft_model_for_adapters(spec) is (lm if is_alone else None)


@pytest.mark.parametrize("word", ["data_parallel_size=2", "engine_kwargs.sglang.dp_size=2"])
def test_replicas_get_merged_weights(word: str) -> None:
    """SGLang cannot load adapters with more than one replica."""
    lm = peft_model()
    config = load_config([f"actor_rollout_ref.rollout.{word}"]).actor_rollout_ref.rollout
    spec = replace(
        spec_of("hf"), has_adapters=True, load_policy=lambda: PolicyModel(lm), config=config
    )
    assert peft_model_for_adapters(spec) is None


def test_a_launched_server_is_told_of_the_adapter_by_names_that_it_knows() -> None:
    """PEFT may name modules by their whole paths, which SGLang refuses."""
    paths = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "v_proj")]
    lm = peft_model(target_modules=paths)
    command, _ = command_and_environment(
        spec_of("hf", model_path="some/model"), lora_server_arguments(lm)
    )
    assert "--enable-lora --max-lora-rank 4" in " ".join(command)
    listening = [*command[3:], "--host", "127.0.0.1", "--port", "1"]
    arguments, _ = parser().parse_known_args(listening)
    assert arguments.lora_target_modules == ["q_proj", "v_proj"]
