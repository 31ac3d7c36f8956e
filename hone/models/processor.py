"""Loads the tokenizer and the processor of a model, under verl's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    """Loads a tokenizer; `correct_pad_token`, `correct_gemma2` and `use_fast` of verl have no effect."""
    tokenizer: Tokenizer = load_tokenizer(
        copy_to_local(name_or_path), trust_remote_code=trust_remote_code
    )
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
    if not isinstance(ids, list | tuple) or any(isinstance(i, list | tuple | str) for i in ids):
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
