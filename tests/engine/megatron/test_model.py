"""Models and layouts that strategy=megatron does not build are refused by name."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from hone.config.engine import MegatronConfig
from hone.models.families import UnsupportedModel

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.slow  # importing megatron-core takes seconds


@pytest.mark.parametrize(
    ("family", "changes", "megatron", "words"),
    [
        ("gemma2", {}, {}, "is a gemma2; strategy=megatron trains llama"),
        ("llama", {"attention_bias": True}, {}, "attention_bias"),
        ("llama", {"mlp_bias": True}, {}, "mlp_bias"),
        ("qwen2", {"use_sliding_window": True}, {}, "use_sliding_window"),
        ("qwen3_moe", {}, {}, "is a qwen3_moe; strategy=megatron trains llama"),
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
    from hone.engine.megatron.model import refuse_model

    config = AutoConfig.for_model(family, **changes)
    with pytest.raises(UnsupportedModel, match=words):
        refuse_model(config, "m", MegatronConfig(**megatron))
