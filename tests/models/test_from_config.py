"""Objects built from a `model` block: the tokenizer with the run's template, adapters from its seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hone.config.model import ModelConfig
from hone.models.from_config import build_lora, build_tokenizer
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
    again, other = adapters(seed=5), adapters(seed=6)
    assert first
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
        assert not torch.equal(tensor, other[name]), name


def test_a_template_of_the_run_replaces_the_tokenizers(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokens = len(tokenizer)
    lm = tiny_lm(tokens, hidden=16, layers=1, heads=2, kv_heads=1, mlp=32)
    model = replace(ModelConfig(), path=str(save_pretrained(lm, tokenizer, tmp_path)))
    assert build_tokenizer(model).chat_template == tokenizer.chat_template
    assert build_tokenizer(replace(model, custom_chat_template="own")).chat_template == "own"


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(PluginError, match=r"model\.external_lib=nowhere_at_all"):
        build_tokenizer(replace(ModelConfig(), external_lib="nowhere_at_all"))
