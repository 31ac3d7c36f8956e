"""From a folder to a module, and where paths lead."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hone.models import attention
from hone.models.load import (
    ModelNotFound,
    eos_ids,
    load_causal_lm,
    load_tokenizer,
    resolve_model_path,
)
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tokenizer = character_tokenizer()
    lm = tiny_lm(len(tokenizer), hidden=32, mlp=48)
    return save_pretrained(lm, tokenizer, tmp_path_factory.mktemp("model"))


def export_at(path):
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return str(path)


def test_a_folder_with_a_config_is_the_model_itself(tmp_path):
    found = export_at(tmp_path / "model")
    assert resolve_model_path(found) == found


def test_a_checkpoint_leads_to_its_export_and_a_run_to_the_newest(tmp_path):
    for step in (2, 10, 9):
        export_at(tmp_path / f"global_step_{step}" / "actor" / "huggingface")
    newest = str(tmp_path / "global_step_10" / "actor" / "huggingface")
    assert resolve_model_path(str(tmp_path)) == newest
    assert resolve_model_path(str(tmp_path / "global_step_10")) == newest
    assert resolve_model_path(str(tmp_path / "global_step_10" / "actor")) == newest
    (tmp_path / "global_step_11").mkdir()  # has no export: the one before it counts
    assert resolve_model_path(str(tmp_path)) == newest


def test_a_hub_name_is_left_alone_and_a_wrong_path_is_not():
    assert resolve_model_path("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    with pytest.raises(ModelNotFound, match="does not exist"):
        resolve_model_path("/no/such/model")


def test_a_folder_without_a_model_says_what_was_expected(tmp_path):
    with pytest.raises(ModelNotFound, match=r"expected config\.json"):
        resolve_model_path(str(tmp_path))


def test_the_model_comes_with_our_attention_and_the_dtype_asked_for(folder):
    lm = load_causal_lm(str(folder), dtype=torch.bfloat16)
    assert lm.config._attn_implementation == attention.NAME
    assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}


def test_overrides_change_the_config_and_unknown_ones_are_refused(folder):
    lm = load_causal_lm(str(folder), dtype=torch.float32, override_config={"rms_norm_eps": 0.5})
    assert lm.model.norm.variance_epsilon == 0.5
    with pytest.raises(ValueError, match="'rms_norm_epss'"):
        load_causal_lm(str(folder), dtype=torch.float32, override_config={"rms_norm_epss": 0.5})


def test_dropout_is_off_in_training_mode_too(tmp_path):
    config = AutoConfig.for_model(
        "phi",
        vocab_size=20,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        resid_pdrop=0.5,
        embd_pdrop=0.5,
        attention_dropout=0.5,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lm = load_causal_lm(str(tmp_path), dtype=torch.float32).train()
    rates = {m.p for m in lm.modules() if isinstance(m, nn.Dropout)}
    assert rates == {0.0}


@pytest.mark.parametrize("kind", ["linear_attention", "chunked_attention"])
def test_layers_that_would_mix_packed_rows_are_refused(folder, kind):
    with pytest.raises(ValueError, match=f"layers of kind {kind}"):
        load_causal_lm(
            str(folder),
            dtype=torch.float32,
            override_config={"layer_types": ["full_attention", kind]},
        )


def test_the_tokenizer_can_always_pad(folder, tmp_path):
    assert load_tokenizer(str(folder)).pad_token == "<pad>"
    tokenizer = character_tokenizer()
    tokenizer.pad_token = None
    lm = tiny_lm(len(tokenizer), hidden=32, mlp=48)
    save_pretrained(lm, tokenizer, tmp_path)
    assert load_tokenizer(str(tmp_path)).pad_token == "</s>"


def test_every_place_that_names_an_end_counts_once():
    def owner(value):
        return SimpleNamespace(eos_token_id=value)

    assert eos_ids(owner(2), owner([7, 2]), owner(9)) == (7, 2, 9)
    assert eos_ids(owner(None), None, owner(4)) == (4,)
