"""Models, layouts and overrides that strategy=megatron does not build are refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from hone.config.engine import MegatronConfig
from hone.config.errors import ConfigError
from hone.engine.megatron import refusals
from hone.engine.megatron.refusals import refuse_model, refuse_overrides
from hone.models.families import UnsupportedModel


@pytest.mark.parametrize(
    ("family", "changes", "megatron", "words"),
    [
        ("gemma2", {}, {}, "is a gemma2; strategy=megatron trains llama"),
        ("llama", {"attention_bias": True}, {}, "attention_bias"),
        ("llama", {"mlp_bias": True}, {}, "mlp_bias"),
        ("qwen2", {"use_sliding_window": True}, {}, "use_sliding_window"),
        ("qwen2_moe", {}, {}, "is a qwen2_moe; strategy=megatron trains llama"),
        ("qwen3_moe", {"num_experts": 6}, {"expert_model_parallel_size": 4}, "6 experts"),
        (
            "qwen3_moe",
            {},
            {"tensor_model_parallel_size": 2, "sequence_parallel": False},
            "=true only",
        ),
        (
            "qwen3_moe",
            {"moe_intermediate_size": 24},
            {"expert_tensor_parallel_size": 2},
            "width 24, which 2 ranks",
        ),
        ("llama", {"hidden_act": "gelu"}, {}, "hidden_act=gelu"),
        (
            "llama",
            {"num_key_value_heads": 2},
            {"tensor_model_parallel_size": 4},
            "2 key-value heads",
        ),
        ("llama", {"num_hidden_layers": 3}, {"pipeline_model_parallel_size": 2}, "3 layers"),
    ],
)
def test_a_model_that_is_not_built_is_refused(family, changes, megatron, words):
    config = AutoConfig.for_model(family, **changes)
    with pytest.raises(UnsupportedModel, match=words):
        refuse_model(config, "m", MegatronConfig(**megatron))


@pytest.mark.parametrize(
    "name",
    [
        "calculate_per_token_loss", "hidden_dropout", "attention_dropout", "tensor_model_parallel_size",
        "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
        "sequence_parallel", "params_dtype", "fp16", "bf16", "variable_seq_lengths", "moe_aux_loss_coeff",
        "moe_expert_capacity_factor", "moe_token_dispatcher_type",
    ],
)  # fmt: skip
def test_an_override_of_what_the_loss_and_the_layout_rest_on_is_refused(name):
    megatron = MegatronConfig(override_transformer_config={name: 1, "recompute_num_layers": 2})
    with pytest.raises(ConfigError, match=f"has {name}, which hone sets"):
        refuse_overrides(megatron)


def test_recomputation_and_fusions_may_be_overridden():
    free = {"recompute_granularity": "selective", "bias_activation_fusion": True}
    free |= {"moe_router_dtype": "fp32", "moe_aux_loss_coeff": 0, "moe_enable_deepep": False}
    refuse_overrides(MegatronConfig(override_transformer_config=free))


def test_the_refusals_do_not_import_megatron_core():
    names = re.findall(r"^(?:import|from) (\S+)", Path(refusals.__file__).read_text(), re.MULTILINE)
    assert "hone.models.load" in names
    assert not [name for name in names if name.startswith("megatron")]
