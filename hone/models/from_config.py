"""What a `model` block of the config asks for: its tokenizer, and its adapters.

Leaves out the weights: which dtype and device they go to is the program's business (load.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hone.config.model import ModelConfig, ModelSourceConfig
from hone.models.external import import_external
from hone.models.load import load_tokenizer
from hone.models.lora import Adapters, draw_adapters

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def build_tokenizer(model: ModelSourceConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model block, after the modules it wants imported first."""
    import_external(model.external_lib)
    tokenizer = load_tokenizer(
        model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
    )
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def adapters_of(model: ModelConfig) -> Adapters | None:
    """The LoRA adapters that a model block asks for."""
    if not model.uses_lora:
        return None
    return Adapters(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        dropout=model.lora_dropout,
        target_modules=model.target_modules,
        exclude_modules=model.exclude_modules,
        adapter_path=model.lora_adapter_path,
    )


def build_lora(lm: PreTrainedModel, model: ModelConfig, seed: int) -> PeftModel:
    """Adapters over the frozen model, drawn from the run's seed so that ranks agree."""
    adapters = adapters_of(model)
    assert adapters is not None, "the model block asks for no adapters"
    return draw_adapters(lm, adapters, seed)
