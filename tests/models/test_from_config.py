"""Objects built from a `model` block: the tokenizer with the run's template, adapters from its seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hone.config.model import ModelConfig
from hone.data.prompt_ids import extract_system_prompt_and_generation, initialize_system_prompt
from hone.models.from_config import (
    build_lora,
    build_tokenizer,
    hf_processor,
    hf_tokenizer,
    import_external,
    normalize_token_ids,
    set_pad_token_id,
)
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.plugins import PluginError


def adapters(seed: int) -> dict[str, torch.Tensor]:
    tokens = len(character_tokenizer())
    lm = tiny_lm(tokens, hidden=16, layers=1, heads=2, kv_heads=1, mlp=32)
    wrapped = build_lora(lm, replace(ModelConfig(), lora_rank=2), seed)
    return {name: p.detach() for name, p in wrapped.named_parameters() if "lora_A" in name}


def test_adapters_depend_only_on_the_seed() -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = adapters(seed=5)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    repeated, other = adapters(seed=5), adapters(seed=6)
    assert first
    for name, tensor in first.items():
        assert torch.equal(tensor, repeated[name]), name
        assert not torch.equal(tensor, other[name]), name


def test_a_template_of_the_run_replaces_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokens = len(tokenizer)
    lm = tiny_lm(tokens, hidden=16, layers=1, heads=2, kv_heads=1, mlp=32)
    model = replace(ModelConfig(), path=str(save_pretrained(lm, tokenizer, tmp_path)))
    assert build_tokenizer(model).chat_template == tokenizer.chat_template
    assert build_tokenizer(replace(model, custom_chat_template="own")).chat_template == "own"


def test_a_module_that_cannot_be_imported_is_named() -> None:
    import_external("json, ")
    with pytest.raises(PluginError, match=r"model\.external_lib=nowhere_at_all"):
        build_tokenizer(replace(ModelConfig(), external_lib="nowhere_at_all"))


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
