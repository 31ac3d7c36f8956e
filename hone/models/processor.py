"""Loads the tokenizer and the processor of a model, under verl's names."""

from __future__ import annotations

from hone.data.files import copy_to_local
from hone.models.load import load_tokenizer
from hone.tokenizer import Processor, Tokenizer


def hf_tokenizer(
    name_or_path: str,
    correct_pad_token: bool = True,
    correct_gemma2: bool = True,
    *,
    trust_remote_code: bool = False,
    use_fast: bool = True,
) -> Tokenizer:
    """Calls `load_tokenizer`; the three verl options have no effect."""
    tokenizer: Tokenizer = load_tokenizer(
        copy_to_local(name_or_path), trust_remote_code=trust_remote_code
    )
    return tokenizer


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
