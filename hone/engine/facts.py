"""The facts about a Hugging Face decoder that workers ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.engine.contract import ModelFacts
from hone.models.families import declared, key_shape
from hone.models.load import eos_ids
from hone.models.lora import is_lora

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_facts(lm: PreTrainedModel) -> ModelFacts:
    """Of the whole model, also where its parameters are sharded or rest on the host."""
    config = lm.config.get_text_config()
    kv_heads, head_dim = key_shape(config)
    weights = list(lm.parameters())
    return ModelFacts(
        vocabulary=lm.get_input_embeddings().weight.shape[0],
        positions=declared(config, "max_position_embeddings"),
        eos_ids=eos_ids(lm.config, getattr(lm, "generation_config", None), None),
        dtype=weights[0].dtype,
        parameters=sum(p.numel() for p in weights),
        parameter_bytes=sum(p.nbytes for p in weights),
        layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * head_dim,
        kv_bytes_per_token=config.num_hidden_layers * 2 * kv_heads * head_dim * weights[0].itemsize,
        has_adapters=is_lora(lm),
    )
