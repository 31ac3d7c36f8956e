"""LoRA: only the adapters are trained; with them disabled the policy equals the reference."""

from __future__ import annotations

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model

from hone.models.lora import (
    AdapterSettings,
    LoraError,
    is_lora,
    is_plain_lora,
    merged_weights,
    wrap_lora,
)
from hone.models.policy import PolicyModel, ValueModel
from hone.models.tiny import tiny_lm
from hone.workers.actor import PolicyObjective
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
    return PolicyModel(wrap_lora(lm, AdapterSettings(**(SETTINGS | changes))))


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
        wrap_lora(lm, AdapterSettings(**(SETTINGS | {"target_modules": ("q_proj", "lm_head")})))


def test_an_adapter_on_embeddings_that_are_also_the_head_is_refused():
    with pytest.raises(LoraError, match="leave the embeddings out of target_modules"):
        lora_policy(target_modules=("embed_tokens",))
    untied = tiny_lm(VOCABULARY, hidden=32, tie_embeddings=False)
    assert is_lora(
        wrap_lora(untied, AdapterSettings(**(SETTINGS | {"target_modules": ("embed_tokens",)})))
    )


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
    model.lm = wrap_lora(model.lm, AdapterSettings(**SETTINGS))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert "value_head.weight" in trained
    assert all("lora_" in n or n.startswith("value_head") for n in trained)
    assert model(pack_batch(rows(), True))["values"].shape == rows().batch["responses"].shape


def existing_adapter(folder, lm, config=None, **settings):
    """Writes an adapter of random weights, as another program would have trained it."""
    config = config or LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **settings)
    adapted = get_peft_model(lm, config)
    generator = torch.Generator().manual_seed(3)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return str(folder)


def untied_lm(family="qwen2", **settings):
    return tiny_lm(
        VOCABULARY, hidden=32, mlp=48, family=family, tie_embeddings=False, seed=1, **settings
    )


@pytest.mark.parametrize(
    ("family", "settings", "is_plain"),
    [
        ("qwen2", {"target_modules": ["q_proj"], "use_rslora": True}, True),
        ("qwen2", {"target_modules": r".*\.(q|v)_proj", "lora_bias": True}, False),
        ("qwen2", {"target_modules": ["q_proj"], "bias": "all"}, False),
        ("qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["mlp", "norm"]}, False),
        ("qwen2", {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}}, False),
        ("mixtral", {"target_modules": "all-linear"}, False),
        ("mixtral", {"target_parameters": ["mlp.experts.gate_up_proj"]}, False),
    ],
)
def test_merged_weights_give_the_policy_of_an_existing_adapter(
    family, settings, is_plain, tmp_path
):
    path = existing_adapter(tmp_path, untied_lm(family), **settings)
    adapted = wrap_lora(untied_lm(family), AdapterSettings(**(SETTINGS | {"adapter_path": path})))
    merged = untied_lm(family)
    start = log_probs(PolicyModel(merged))
    merged.load_state_dict(dict(merged_weights(adapted)), strict=True)
    expected = log_probs(PolicyModel(adapted))
    assert (expected - start).abs().max() > 1e-3
    torch.testing.assert_close(log_probs(PolicyModel(merged)), expected)
    assert is_plain_lora(adapted) == is_plain


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        (
            IA3Config(task_type="CAUSAL_LM", target_modules=["q_proj"], feedforward_modules=[]),
            "IA3",
        ),
    ],
)
def test_an_adapter_that_is_not_a_sum_of_low_rank_matrices_is_refused(config, message, tmp_path):
    settings = {"config": config} if isinstance(config, IA3Config) else config
    path = existing_adapter(tmp_path, untied_lm(), **({"target_modules": ["q_proj"]} | settings))
    with pytest.raises(LoraError, match=message):
        wrap_lora(untied_lm(), AdapterSettings(**(SETTINGS | {"adapter_path": path})))


def test_an_adapter_of_another_model_is_refused(tmp_path):
    path = existing_adapter(tmp_path, untied_lm(layers=3), target_modules=["q_proj"])
    with pytest.raises(LoraError, match="for another model: its file also has"):
        wrap_lora(untied_lm(), AdapterSettings(**(SETTINGS | {"adapter_path": path})))


def test_an_adapter_path_may_be_below_home(tmp_path, monkeypatch):
    existing_adapter(tmp_path / "adapter", untied_lm(), target_modules=["q_proj"])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert is_lora(
        wrap_lora(untied_lm(), AdapterSettings(**(SETTINGS | {"adapter_path": "~/adapter"})))
    )


def test_a_classifier_continues_the_adapter_of_a_language_model_and_trains_its_own_head(tmp_path):
    path = existing_adapter(tmp_path, untied_lm(), target_modules=["q_proj"])
    lm = untied_lm()
    lm.score = torch.nn.Linear(32, 1)
    adapted = wrap_lora(lm, AdapterSettings(**(SETTINGS | {"adapter_path": path})))
    weights = dict(adapted.named_parameters())
    trained = [name for name, p in weights.items() if p.requires_grad and ".lora_" not in name]
    assert trained
    assert all(".score.modules_to_save." in name for name in trained)
    assert all((p != 0).any() for name, p in weights.items() if ".lora_B." in name)
