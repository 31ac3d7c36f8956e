"""Imports the external modules and builds the tokenizer and adapters of a `model` config block.

load.py loads the weights, whose dtype and device depend on the program.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hone.config.model import ModelConfig, ModelSourceConfig
from hone.models.load import load_tokenizer
from hone.models.lora import AdapterSettings, init_lora
from hone.plugins import PluginError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def import_external(names: str | Sequence[str] | None) -> None:
    """Imports the modules of `model.external_lib`: names separated by commas, or a list of names."""
    modules = names.split(",") if isinstance(names, str) else list(names or ())
    for name in (n.strip() for n in modules):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise PluginError(
                f"model.external_lib={name} cannot be imported ({error}); install it or add its "
                "folder to PYTHONPATH"
            ) from error


def build_tokenizer(model: ModelSourceConfig) -> PreTrainedTokenizerBase:
    """Imports the external modules of a model block and returns its tokenizer."""
    import_external(model.external_lib)
    tokenizer = load_tokenizer(
        model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code
    )
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def lora_adapters_or_none(model: ModelConfig) -> AdapterSettings | None:
    """Returns the settings of the LoRA adapters of a model block, or None if the block has no adapters."""
    if not model.uses_lora:
        return None
    return AdapterSettings(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        dropout=model.lora_dropout,
        target_modules=model.target_modules,
        exclude_modules=model.exclude_modules,
        adapter_path=model.lora_adapter_path,
    )


def build_lora(lm: PreTrainedModel, model: ModelConfig, seed: int) -> PeftModel:
    """Wraps the frozen model in adapters that are initialized from the seed, equally on all ranks."""
    adapters = lora_adapters_or_none(model)
    assert adapters is not None, "the model block has no adapters"
    return init_lora(lm, adapters, seed)
