"""verl's names of a model's tokenizer and processor."""

from __future__ import annotations

from pathlib import Path

from hone.models.processor import hf_processor, hf_tokenizer
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm


def test_a_model_of_text_has_a_tokenizer_that_pads_and_no_processor(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    folder = save_pretrained(
        tiny_lm(len(tokenizer), hidden=16, layers=1, mlp=16), tokenizer, tmp_path
    )
    loaded = hf_tokenizer(str(folder), trust_remote_code=False)
    assert loaded.encode("ab") == tokenizer.encode("ab")
    assert loaded.pad_token_id is not None
    assert hf_processor(str(folder)) is None
