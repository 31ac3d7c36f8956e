"""LoRA: only the adapters are trained; with them disabled the policy equals the reference."""

from __future__ import annotations

import pytest
import torch

from hone.models.lora import LoraError, is_lora, merged_weights, wrap_lora
from hone.models.policy import PolicyModel, ValueModel
from hone.models.tiny import tiny_lm
from hone.workers.objectives import PolicyObjective
from tests.engine.batches import VOCABULARY, pack_batch, rows
from tests.engine.engines import ADAM, actor, make_engine

SETTINGS = {
    "rank": 4,
    "alpha": 6.0,
    "dropout": 0.0,
    "target_modules": "all-linear",
    "exclude_modules": None,
    "adapter_path": None,
}


def lora_policy(dtype=torch.float32, **changes):
    lm = tiny_lm(VOCABULARY, hidden=32, mlp=48, seed=1).to(dtype)
    torch.manual_seed(0)
    return PolicyModel(wrap_lora(lm, **(SETTINGS | changes)))


def log_probs(model):
    with torch.no_grad():
        return model(pack_batch(rows(), True), temperature=1.0)["log_probs"]


def test_only_adapters_are_trained_and_disabling_them_gives_the_reference():
    model = lora_policy()
    start = {n: p.clone() for n, p in model.named_parameters()}
    reference = log_probs(PolicyModel(tiny_lm(VOCABULARY, hidden=32, mlp=48, seed=1)))
    torch.testing.assert_close(log_probs(model), reference)  # a fresh adapter adds nothing
    engine = make_engine(model, ADAM)
    for _ in range(2):
        engine.train_minibatch(rows(), PolicyObjective(actor(), temperature=1.0))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, start[name]) == ("lora_" not in name), name
    assert (log_probs(model) - reference).abs().max() > 1e-3
    with model.lm.disable_adapter():
        torch.testing.assert_close(log_probs(model), reference)
    assert (log_probs(model) - reference).abs().max() > 1e-3


def test_targets_and_exclusions_are_taken_from_the_settings():
    model = lora_policy(target_modules=("q_proj", "v_proj"), exclude_modules=("v_proj",))
    adapted = {n.split(".")[-4] for n, _ in model.named_parameters() if "lora_A" in n}
    assert adapted == {"q_proj"}
    layer = model.lm.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert layer.scaling["default"] == 1.5


def test_adapters_keep_the_dtype_of_the_base():
    model = lora_policy(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_an_adapter_on_the_head_is_refused():
    lm = tiny_lm(VOCABULARY, hidden=32, tie_embeddings=False)
    with pytest.raises(LoraError, match="leave lm_head out of target_modules"):
        wrap_lora(lm, **(SETTINGS | {"target_modules": ("q_proj", "lm_head")}))


def test_an_adapter_on_embeddings_that_are_also_the_head_is_refused():
    with pytest.raises(LoraError, match="leave the embeddings out of target_modules"):
        lora_policy(target_modules=("embed_tokens",))
    untied = tiny_lm(VOCABULARY, hidden=32, tie_embeddings=False)
    assert is_lora(wrap_lora(untied, **(SETTINGS | {"target_modules": ("embed_tokens",)})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ("no_such_module",)}, "no_such_module"),
        ({"rank": 0}, "rank 0"),
        ({"adapter_path": "."}, "adapter_config.json"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LoraError, match=message) as refused:
        lora_policy(**changes)
    assert "\n" not in str(refused.value)


def test_merged_names_are_those_of_the_base():
    model = lora_policy()
    assert is_lora(model.lm)
    plain = tiny_lm(VOCABULARY, hidden=32)
    assert not is_lora(plain)
    assert [n for n, _ in merged_weights(model.lm)] == [n for n, _ in plain.named_parameters()]


def test_gradient_checkpointing_still_reaches_the_adapters():
    grads = []
    for checkpointing in (False, True):
        model = lora_policy()
        if checkpointing:
            model.lm.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        model(pack_batch(rows(), True), temperature=1.0)["log_probs"].sum().backward()
        grads.append([p.grad for n, p in model.named_parameters() if "lora_B" in n])
    assert all((g != 0).any() for g in grads[0])
    for plain, recomputed in zip(*grads, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_a_value_model_with_adapters_trains_its_head():
    model = ValueModel(tiny_lm(VOCABULARY, hidden=32, mlp=48))
    model.lm = wrap_lora(model.lm, **SETTINGS)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert "value_head.weight" in trained
    assert all("lora_" in n or n.startswith("value_head") for n in trained)
    assert model(pack_batch(rows(), True))["values"].shape == rows().batch["responses"].shape
