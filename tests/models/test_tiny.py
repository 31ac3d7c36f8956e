"""Tiny models and tokenizers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer

from hone.models.families import UnsupportedModel
from hone.models.load import load_tokenizer
from hone.models.tiny import TinyModelError, character_tokenizer, save_pretrained, tiny_lm

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_round_trip_is_exact_with_one_token_per_character(tmp_path, family):
    tokenizer = character_tokenizer()
    text = "What is 3 + 4?\n{\"answer\": 'seven'} ~"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    save_pretrained(tiny_lm(len(tokenizer), hidden=32, family=family), tokenizer, tmp_path)
    ours, plain = load_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    for loaded in (ours, plain):
        assert loaded.encode(text) == ids
        assert loaded.decode(ids, skip_special_tokens=True) == text
        assert len(loaded) == len(tokenizer)
        assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)


def test_words_are_single_tokens():
    tokenizer = character_tokenizer("abc+", words=["<think>", "a+b"])
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("<think>a+bca")) == [
        "<think>",
        "a+b",
        "c",
        "a",
    ]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_words_with_spaces_are_the_same_tokens_for_plain_transformers(tmp_path, family):
    words = [", yes\n", " the", "the", "the moon"]
    tokenizer = character_tokenizer(words=words)
    text = "is the moon the sun, yes\n or,  yes"
    expected = ["i", "s", " the", " ", "m", "o", "o", "n", " the", " ", "s", "u", "n", ", yes\n"]
    expected += [" ", "o", "r", ",", " ", " ", "y", "e", "s"]  # "the" matches before "the moon"
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    save_pretrained(tiny_lm(len(tokenizer), hidden=32, family=family), tokenizer, tmp_path)
    plain = AutoTokenizer.from_pretrained(tmp_path)
    assert plain.encode(text) == ids
    assert plain.decode(ids) == text


def test_the_template_writes_one_line_per_turn():
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
def test_the_weights_depend_only_on_the_seed(family):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = tiny_lm(30, hidden=32, family=family, seed=1).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)  # the global generator was not used
    torch.manual_seed(8)
    repeated = tiny_lm(30, hidden=32, family=family, seed=1).state_dict()
    other = tiny_lm(30, hidden=32, family=family, seed=2).state_dict()
    assert all(torch.equal(first[n], repeated[n]) for n in first)
    assert not all(torch.equal(first[n], other[n]) for n in first)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"family": "lama"}, "Did you mean 'llama'"),
        ({"family": "nonsense"}, "no decoder family 'nonsense'"),
        ({"hidden": 30, "heads": 4}, "use hidden=32"),
        ({"hidden": 12, "heads": 4}, "into even parts"),
        ({"layers": 0}, "at least 1"),
        ({"hidden": 65}, "use hidden=72"),
        ({"family": "gemma3"}, "gemma3 has parts other than its text model"),
        ({"hidden": 32, "heads": 4, "kv_heads": 3}, "kv_heads=3"),
    ],
)
def test_the_error_of_an_invalid_shape_names_a_valid_one(shape, message):
    with pytest.raises(TinyModelError, match=message):
        tiny_lm(30, **shape)


@pytest.mark.parametrize("family", ["qwen3_5_text", "bert", "bart", "mamba", "bloom"])
def test_a_family_that_is_not_supported_is_refused_by_name(family):
    with pytest.raises(UnsupportedModel, match=f"is a {family} model, which is not supported"):
        tiny_lm(30, family=family)


def test_a_setting_that_a_family_does_not_have_is_left_out():
    assert not hasattr(tiny_lm(30, hidden=32, family="gpt_neox").config, "num_key_value_heads")
