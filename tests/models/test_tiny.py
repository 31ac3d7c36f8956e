"""Models and tokenizers made on the spot."""

from __future__ import annotations

import pytest
import torch

from hone.models.load import load_tokenizer
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma"]


@pytest.mark.parametrize("family", FAMILIES)
def test_text_survives_the_round_trip_one_token_a_character(tmp_path, family):
    tokenizer = character_tokenizer()
    text = "What is 3 + 4?\n{\"answer\": 'seven'} ~"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    save_pretrained(tiny_lm(len(tokenizer), hidden=32, family=family), tokenizer, tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again.encode(text) == ids
    assert again.decode(ids) == text
    assert (again.pad_token_id, again.bos_token_id, again.eos_token_id) == (0, 1, 2)


def test_words_are_single_tokens():
    tokenizer = character_tokenizer("abc+", words=["<think>", "a+b"])
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("<think>a+bca")) == [
        "<think>",
        "a+b",
        "c",
        "a",
    ]


def test_the_template_writes_one_line_a_turn():
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    text = character_tokenizer().apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text == "u:1+1\na:2\nu:2+2\na:"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_alone_decides_the_weights(family):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = tiny_lm(30, hidden=32, family=family, seed=1).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)  # nobody else's numbers were used
    torch.manual_seed(8)
    again = tiny_lm(30, hidden=32, family=family, seed=1).state_dict()
    other = tiny_lm(30, hidden=32, family=family, seed=2).state_dict()
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not all(torch.equal(first[n], other[n]) for n in first)
