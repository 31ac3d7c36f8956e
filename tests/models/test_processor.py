"""The tokenizer and processor of a model, under verl's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hone.data.prompts import extract_system_prompt_and_generation, initialize_system_prompt
from hone.models.processor import hf_processor, hf_tokenizer, normalize_token_ids, set_pad_token_id
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


@pytest.mark.parametrize(
    "output",
    [
        [1, 2],
        (1, 2),
        [[1, 2]],
        torch.tensor([[1, 2]]),
        {"input_ids": [1, 2], "attention_mask": [1, 1]},
        {"input_ids": torch.tensor([1, 2])},
    ],
)
def test_token_ids_in_any_form_become_one_list(output: object) -> None:
    assert normalize_token_ids(output) == [1, 2]


@pytest.mark.parametrize("output", ["12", 3, [[1], [2]]])
def test_other_values_than_the_ids_of_one_text_are_refused(output: object) -> None:
    with pytest.raises(TypeError, match="token ids of one text"):
        normalize_token_ids(output)


def test_a_tokenizer_without_padding_token_uses_its_eos_token() -> None:
    tokenizer = character_tokenizer()
    before = tokenizer.pad_token_id
    set_pad_token_id(tokenizer)
    assert tokenizer.pad_token_id == before
    tokenizer.pad_token = None
    set_pad_token_id(tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_the_system_prompt_and_generation_prompt_are_read_from_the_template() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "SYS{% for m in messages %}[{{ m.content }}]{% endfor %}"
        "{% if add_generation_prompt %}>>{% endif %}"
    )
    opening, start = extract_system_prompt_and_generation(tokenizer)
    assert (tokenizer.decode(opening), tokenizer.decode(start)) == ("SYS", ">>")
    assert initialize_system_prompt(tokenizer) == opening
