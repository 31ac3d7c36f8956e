"""The Hugging Face export: `from_pretrained` loads it, with the same logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from hone.config.engine import FSDPConfig
from hone.engine.build import load_module
from hone.engine.contract import EngineSpec, Mesh
from hone.models.load import load_causal_lm
from hone.models.lora import AdapterSettings, adapter_weights, wrap_lora
from hone.models.paths import resolve_model_path
from hone.models.policy import PolicyModel
from hone.models.tiny import character_tokenizer, save_pretrained, tiny_lm
from hone.ops.rows import MicroBatchRule
from hone.tracking.manifest import write_manifest
from hone.workers.actor import PolicyObjective
from tests.engine import ranks
from tests.engine.batches import VOCABULARY, pack_batch, rows
from tests.engine.engines import ADAM, actor, make_engine, policy


def train(model):
    engine = make_engine(model, ADAM)
    for _ in range(2):
        engine.train_minibatch(rows(), PolicyObjective(actor(), temperature=1.0))
    return engine


def log_probs(model):
    model.eval()
    with torch.no_grad():
        return model(pack_batch(rows(), True), temperature=1.0)["log_probs"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_the_export_has_the_same_logits(family, tied, tmp_path):
    model = policy(family=family, tie_embeddings=tied)
    train(model).export(tmp_path, character_tokenizer())
    ids = torch.tensor([[3, 4, 5, 9, 12]])
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "huggingface", attn_implementation="eager"
    )
    ours = tiny_lm(VOCABULARY, hidden=32, mlp=48, family=family, tie_embeddings=tied)
    ours.load_state_dict(model.lm.state_dict())
    ours.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, ours(ids).logits, rtol=0, atol=0)
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == tied
    assert plain.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / "huggingface").decode([5]) != ""


def test_a_run_starts_from_another_runs_folder(tmp_path):
    model = policy()
    folder = tmp_path / "run" / "global_step_3" / "actor"
    train(model).export(folder, character_tokenizer())
    write_manifest(folder.parent)
    assert resolve_model_path(str(tmp_path / "run")) == str(folder / "huggingface")
    reloaded = PolicyModel(load_causal_lm(str(tmp_path / "run"), dtype=torch.float32))
    assert torch.equal(log_probs(reloaded), log_probs(model))


def test_only_rank_0_writes(tmp_path):
    engine = make_engine(policy(), ADAM)
    engine.mesh = Mesh(data_parallel_rank=1, data_parallel_size=2)
    engine.export(tmp_path, character_tokenizer())
    assert not list(tmp_path.iterdir())


def test_a_lora_export_is_merged_and_has_an_adapter_folder(tmp_path):
    model = ranks.lora_policy()
    before = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    engine = train(model)
    engine.export(tmp_path, character_tokenizer())
    merged = PolicyModel(load_causal_lm(str(tmp_path), dtype=torch.float32))
    torch.testing.assert_close(log_probs(merged), log_probs(model), rtol=1e-5, atol=1e-5)
    with safe_open(tmp_path / "huggingface" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {n for n, _ in tiny_lm(VOCABULARY).named_parameters()}
    after = dict(model.named_parameters())
    assert all(
        torch.equal(after[n], x) for n, x in before.items()
    )  # merging did not change the base


def test_the_adapter_folder_continues_and_opens_with_peft(tmp_path):
    model = ranks.lora_policy()
    train(model).export(tmp_path, character_tokenizer())
    expected = log_probs(model)
    adapter = str(tmp_path / "lora_adapter")
    reloaded = policy()
    reloaded.lm = wrap_lora(
        reloaded.lm, AdapterSettings(**(ranks.LORA | {"adapter_path": adapter}))
    )
    assert torch.equal(log_probs(reloaded), expected)
    assert any(p.requires_grad for p in reloaded.parameters())
    by_peft = PolicyModel(PeftModel.from_pretrained(policy().lm, adapter))
    assert torch.equal(log_probs(by_peft), expected)


def test_in_bfloat16_the_merge_rounds_once(tmp_path):
    model = policy(dtype=torch.bfloat16)
    torch.manual_seed(0)
    model.lm = wrap_lora(model.lm, AdapterSettings(**ranks.LORA))
    engine = train(model)
    actual = dict(engine.named_hf_weights())
    name = "model.layers.0.mlp.up_proj"
    layer = model.lm.get_submodule(f"base_model.model.{name}")
    delta = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float() * 2
    expected = (layer.base_layer.weight.float() + delta).bfloat16()
    tensor = actual[f"{name}.weight"]
    assert tensor.dtype == torch.bfloat16
    torch.testing.assert_close(tensor, expected, rtol=0.01, atol=1e-4)


def test_the_adapters_of_a_model_without_an_optimizer_are_known(tmp_path):
    """A rollout worker in a process of its own loads such a model, to tell vLLM the names of the adapters."""
    model = save_pretrained(tiny_lm(VOCABULARY), character_tokenizer(), tmp_path)
    names = {name for name, _ in adapter_weights(ranks.lora_policy().lm)}
    spec = EngineSpec(
        "policy",
        str(model),
        torch.device("cpu"),
        torch.float32,
        FSDPConfig(),
        lambda slots: MicroBatchRule(1, 1),
        lambda slots: MicroBatchRule(1, 1),
        response_width=1,
        adapters=AdapterSettings(**ranks.LORA),
    )
    module = load_module(spec)
    assert names == {name for name, _ in adapter_weights(module.lm)}
    assert not module.lm.base_model.model.model.embed_tokens.weight.requires_grad
    plain = load_module(replace(spec, adapters=None))
    assert not any(p.requires_grad for p in plain.parameters())
