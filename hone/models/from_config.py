"""Imports the external modules and builds the tokenizer and adapters of a `model` config block.

load.py loads the weights, whose dtype and device depend on the program. `hf_tokenizer` and the functions
after it have the names of `verl.utils.tokenizer`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hone.config.model import ModelConfig, ModelSourceConfig
from hone.data.files import copy_to_local
from hone.models.load import load_tokenizer
from hone.models.lora import AdapterSettings, init_lora
from hone.plugins import PluginError
from hone.tokenizer import Processor, Tokenizer

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def import_external(names: str | Sequence[str] | None) -> None:
    """Imports the modules of `model.external_lib`: names separated by commas, or a list of names."""
    modules = names.split(",") if isinstance(names, str) else names or ()
    for name in filter(None, map(str.strip, modules)):
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


def hf_tokenizer(
    name_or_path: str,
    correct_pad_token: bool = True,
    correct_gemma2: bool = True,
    *,
    trust_remote_code: bool = False,
    use_fast: bool = True,
) -> Tokenizer:
    """Loads a tokenizer; `correct_pad_token`, `correct_gemma2` and `use_fast` of verl have no effect."""
    tokenizer: Tokenizer = load_tokenizer(name_or_path, trust_remote_code=trust_remote_code)
    return tokenizer


def set_pad_token_id(tokenizer: Tokenizer) -> None:
    """Makes the end-of-sequence token the padding token, unless the tokenizer has a padding token."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def normalize_token_ids(tokenized_output: Any) -> list[int]:
    """Returns token ids as a list of integers, from any type that a tokenizer returns."""
    ids = tokenized_output
    if isinstance(ids, Mapping) or hasattr(ids, "input_ids"):
        ids = ids["input_ids"]
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(ids, list | tuple) and len(ids) == 1 and isinstance(ids[0], list | tuple):
        ids = ids[0]
    is_sequence = isinstance(ids, list | tuple)
    if not is_sequence or any(isinstance(token, list | tuple | str) for token in ids):
        raise TypeError(f"expected the token ids of one text, got {tokenized_output!r}")
    return [int(token) for token in ids]


def hf_processor(name_or_path: str, *, trust_remote_code: bool = False) -> Processor | None:
    """Returns the processor of a multimodal model, or None for a text-only model."""
    from transformers import AutoProcessor

    try:
        processor: Processor = AutoProcessor.from_pretrained(
            copy_to_local(name_or_path), trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError):
        return None
    has_media = hasattr(processor, "image_processor") or hasattr(processor, "feature_extractor")
    return processor if has_media else None
