"""Models, layouts and overrides that strategy=megatron does not build are refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from hone.config.engine import MegatronConfig
from hone.config.errors import ConfigError
from hone.engine.megatron import refusals
from hone.engine.megatron.refusals import (
    check_model_supported,
    check_transformer_overrides,
    overrides_without_effect,
    passed_overrides,
)
from hone.models.families import UnsupportedModel


@pytest.mark.parametrize(
    ("family", "changes", "megatron", "message"),
    [
        ("gemma2", {}, {}, "is a gemma2 model; strategy=megatron trains llama"),
        ("llama", {"attention_bias": True}, {}, "attention_bias"),
        ("llama", {"mlp_bias": True}, {}, "mlp_bias"),
        ("qwen2", {"use_sliding_window": True}, {}, "use_sliding_window"),
        ("qwen2_moe", {}, {}, "is a qwen2_moe model; strategy=megatron trains llama"),
        ("qwen3_moe", {"num_experts": 6}, {"expert_model_parallel_size": 4}, "6 experts"),
        (
            "qwen3_moe",
            {},
            {"tensor_model_parallel_size": 2, "sequence_parallel": False},
            "need megatron.sequence_parallel=true",
        ),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 24},
            {"expert_tensor_parallel_size": 2},
            "width 24, which megatron.expert_tensor_parallel_size=2",
        ),
        ("llama", {"hidden_act": "gelu"}, {}, "hidden_act=gelu"),
        (
            "llama",
            {"num_key_value_heads": 2},
            {"tensor_model_parallel_size": 4},
            "2 key-value heads",
        ),
        (
            "llama",
            {"intermediate_size": 100},
            {"tensor_model_parallel_size": 8},
            "100 MLP features, which megatron.tensor_model_parallel_size=8",
        ),
        ("llama", {"num_hidden_layers": 3}, {"pipeline_model_parallel_size": 2}, "3 layers"),
    ],
)
def test_an_unsupported_model_is_refused(family, changes, megatron, message):
    config = AutoConfig.for_model(family, **changes)
    with pytest.raises(UnsupportedModel, match=message):
        check_model_supported(config, "m", MegatronConfig(**megatron))


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@pytest.mark.parametrize(
    ("stages", "ends", "fits"),
    [
        (2, {FIRST: 1}, True),
        (2, {FIRST: 2, LAST: 3}, True),
        (3, {LAST: 1}, True),
        (4, {FIRST: 1, LAST: 2}, True),
        (1, {LAST: 3}, True),  # without a pipeline it is not read
        (3, {LAST: 2}, False),
        (2, {FIRST: 2, LAST: 2}, False),
        (2, {FIRST: 5}, False),
        (2, {FIRST: 0}, False),
    ],
)
def test_first_and_last_stage_may_have_other_numbers_of_layers(stages, ends, fits):
    config = AutoConfig.for_model("llama", num_hidden_layers=5)
    sizes = {"pipeline_model_parallel_size": stages, "override_transformer_config": ends}
    megatron = MegatronConfig(**sizes)
    if fits:
        check_model_supported(config, "m", megatron)
        assert passed_overrides(megatron) == (ends if stages > 1 else {})
        return
    with pytest.raises(UnsupportedModel, match=f"5 layers, .*_size={stages} with num_layers_in_"):
        check_model_supported(config, "m", megatron)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("calculate_per_token_loss", False),
        ("hidden_dropout", 0.1),
        ("attention_dropout", 0.1),
        ("tensor_model_parallel_size", 1),
        ("context_parallel_size", 2),
        ("expert_model_parallel_size", 1),
        ("sequence_parallel", False),
        ("params_dtype", "bf16"),
        ("bf16", True),
        ("fp16", True),
        ("fp8", "hybrid"),
        ("fp32_residual_connection", True),
        ("layernorm_epsilon", 1e-5),
        ("rotary_interleaved", True),
        ("window_size", [128, 0]),
        ("softmax_type", "off-by-one"),
        ("moe_aux_loss_coeff", 0.01),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_ffn_hidden_size", 0),
        ("moe_router_topk", 0),
        ("moe_router_pre_softmax", False),
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_topk_scaling_factor", 2.5),
        ("moe_router_dtype", "bf16"),
        ("batch_invariant_mode", True),
        ("no_such_field", 1),
    ],
)
def test_an_override_that_would_train_another_model_is_refused(name, value):
    megatron = MegatronConfig(override_transformer_config={name: value, "recompute_num_layers": 2})
    with pytest.raises(ConfigError, match=f"has {name}, which hone sets"):
        check_transformer_overrides(megatron)


def test_recomputation_and_the_values_that_hone_uses_are_accepted():
    read = {"recompute_granularity": "selective", "moe_router_dtype": "fp32"}
    same = {"moe_aux_loss_coeff": 0, "moe_router_load_balancing_type": "none", "hidden_dropout": 0}
    same |= {"rotary_interleaved": False}
    same |= dict.fromkeys(("fp8", "recompute_method", "attention_backend"))  # null
    megatron = MegatronConfig(override_transformer_config=read | same)
    check_transformer_overrides(megatron)
    assert passed_overrides(megatron) == read
    assert overrides_without_effect(megatron) == []


def test_overrides_without_effect_are_named_and_dropped():
    fast = {"moe_permute_fusion": True, "moe_token_dispatcher_type": "flex", "use_flash_attn": True}
    modules = {"recompute_modules": ["moe", "layernorm"]}
    megatron = MegatronConfig(override_transformer_config=fast | modules)
    check_transformer_overrides(megatron)
    assert passed_overrides(megatron) == {"recompute_modules": ["moe"]}
    (note,) = overrides_without_effect(megatron)
    assert f"has {', '.join(fast)}, layernorm in recompute_modules, which has no effect" in note


def test_the_refusals_do_not_import_megatron_core():
    names = re.findall(r"^(?:import|from) (\S+)", Path(refusals.__file__).read_text(), re.MULTILINE)
    assert "hone.models.load" in names
    assert not [name for name in names if name.startswith("megatron")]
