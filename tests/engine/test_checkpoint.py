"""Checkpoints of the engine: saving, loading, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from hone.config.actor import CriticConfig
from hone.config.engine import OptimConfig
from hone.engine.checkpoint import BaseModelMismatch, CheckpointMissing, ModelMismatch
from hone.models.lora import AdapterSettings, wrap_lora
from hone.workers.actor import PolicyObjective
from hone.workers.critic import ValueObjective
from tests.engine import ranks
from tests.engine.batches import rows
from tests.engine.engines import ADAM, SGD, actor, critic, make_engine, policy, weights

CONTENTS = ("model", "optimizer", "extra", "hf_model")
MOMENTUM = OptimConfig(
    optimizer="SGD", lr=0.1, override_optimizer_config={"momentum": 0.9, "nesterov": True}
)


def train(engine, times=1):
    for _ in range(times):
        metrics = engine.train_minibatch(rows(), PolicyObjective(actor(), temperature=1.0))
        engine.optimizer.advance_schedule()
    return metrics


def bf16():
    return policy(dtype=torch.bfloat16)


MODELS = {
    "fp32": (policy, ADAM),
    "untied": (lambda: policy(tie_embeddings=False), ADAM),
    "bf16": (bf16, OptimConfig(lr=1e-4)),
    "lora": (ranks.lora_policy, ADAM),
    "dropout": (lambda: ranks.lora_policy(dropout=0.3), ADAM),
    "sgd": (policy, SGD),
    "momentum": (policy, MOMENTUM),
    "scheduled": (policy, OptimConfig(lr=1e-2, lr_warmup_steps=4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_engine_continues_bit_for_bit(name, tmp_path):
    make, optim = MODELS[name]
    engine = make_engine(make(), optim)
    train(engine, 2)
    engine.save(tmp_path, CONTENTS)
    saved = weights(engine)
    expected = train(engine, 2)
    other = make_engine(make(), optim)
    other.load(tmp_path)
    assert all(torch.equal(weights(other)[n], x) for n, x in saved.items())
    assert other.optimizer.state_dict() == {"updates": 2, "skipped": 0, "schedule_step": 2}
    assert train(other, 2) == expected
    assert all(torch.equal(weights(other)[n], x) for n, x in weights(engine).items())


def test_a_checkpoint_of_a_fused_optimizer_loads_into_an_unfused_one(tmp_path):
    """The optimizer of one rank is fused, that of sharded tensors is not."""
    engine = make_engine(policy(), MOMENTUM)
    train(engine, 2)
    engine.save(tmp_path, CONTENTS)
    settings = dict(MOMENTUM.override_optimizer_config or {}) | {"foreach": False}
    other = make_engine(policy(), replace(MOMENTUM, override_optimizer_config=settings))
    other.load(tmp_path)
    (group,) = other.optimizer.torch_optimizer.param_groups
    assert (group["fused"], group["foreach"]) == (None, False)
    assert train(other) == pytest.approx(train(engine), rel=1e-6)


def test_a_resumed_run_has_the_optimizer_settings_of_its_own_config(tmp_path):
    """As with lr, a changed setting takes effect; torch would silently keep those of the checkpoint."""
    engine = make_engine(policy(), OptimConfig(lr=1e-2, weight_decay=0.5))
    train(engine)
    engine.save(tmp_path, CONTENTS)
    changes = OptimConfig(
        lr=1e-2, weight_decay=0.0, betas=(0.5, 0.6), override_optimizer_config={"eps": 1e-3}
    )
    other = make_engine(policy(), changes)
    other.load(tmp_path)
    (group,) = other.optimizer.torch_optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.0, (0.5, 0.6), 1e-3)


@pytest.mark.filterwarnings("error:torch.distributed is disabled:UserWarning")
def test_one_process_saves_and_loads_without_a_warning(tmp_path):
    engine = make_engine(policy(), ADAM)
    engine.save(tmp_path, CONTENTS)
    engine.load(tmp_path)


def test_masters_are_saved_in_float32(tmp_path):
    make, optim = MODELS["bf16"]
    engine = make_engine(make(), optim)
    train(engine, 3)
    engine.save(tmp_path, CONTENTS)
    other = make_engine(make(), optim)
    other.load(tmp_path)
    saved, loaded = engine.optimizer.master_copies(), other.optimizer.master_copies()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert any(not torch.equal(m, m.bfloat16().float()) for m in loaded.values())


def test_without_saved_masters_they_start_from_the_loaded_weights(tmp_path):
    engine = make_engine(bf16(), ADAM)
    train(engine, 2)
    engine.save(tmp_path, ("model",))
    other = make_engine(bf16(), ADAM)
    other.load(tmp_path)
    for parameter, master in other.optimizer._parameters_and_masters():
        assert torch.equal(master, parameter.float())
    assert other.optimizer.updates == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_optimizer_alone_keeps_the_weights_of_this_runs_model(tmp_path, dtype):
    engine = make_engine(policy(dtype=dtype), ADAM)
    train(engine, 3)
    engine.save(tmp_path, CONTENTS)
    other = make_engine(policy(seed=9, dtype=dtype), ADAM)
    before = {n: x.float() for n, x in weights(other).items()}
    other.load(tmp_path, ("optimizer",))
    train(other)
    largest = max((x.float() - before[n]).abs().max() for n, x in weights(other).items())
    assert 0 < largest < 5 * ADAM.lr


def test_saving_does_not_change_the_engine(tmp_path):
    undisturbed, saved = make_engine(policy(), ADAM), make_engine(policy(), ADAM)
    saved.save(tmp_path, CONTENTS)
    assert not saved.optimizer.torch_optimizer.state
    assert train(saved, 2) == train(undisturbed, 2)
    assert all(torch.equal(weights(saved)[n], x) for n, x in weights(undisturbed).items())
    fresh = make_engine(policy(seed=9), ADAM)
    fresh.load(tmp_path)
    train(fresh, 2)
    assert all(torch.equal(weights(fresh)[n], x) for n, x in weights(undisturbed).items())


def test_only_the_requested_parts_are_loaded(tmp_path):
    engine = make_engine(policy(), ADAM)
    train(engine, 2)
    engine.save(tmp_path, CONTENTS)
    other = make_engine(policy(seed=9), ADAM)
    other.load(tmp_path, ("model",))
    assert all(torch.equal(weights(other)[n], x) for n, x in weights(engine).items())
    assert not other.optimizer.torch_optimizer.state
    assert other.optimizer.updates == 0


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_an_optimizer_without_the_model_does_not_replace_the_weights(name, tmp_path):
    make, optim = MODELS[name]
    engine = make_engine(make(), optim)
    train(engine, 2)
    engine.save(tmp_path, CONTENTS)
    other = make_engine(make(), replace(optim, lr=0.0))
    start = weights(other)
    other.load(tmp_path, ["optimizer"])
    train(other)
    assert all(torch.equal(weights(other)[n], x) for n, x in start.items())


def test_a_checkpoint_without_the_model_is_refused_with_a_reason(tmp_path):
    engine = make_engine(policy(), ADAM)
    train(engine)
    engine.save(tmp_path / "no-model", ("optimizer",))
    with pytest.raises(CheckpointMissing, match=r"no model state \(it has moments"):
        make_engine(policy(), ADAM).load(tmp_path / "no-model")
    with pytest.raises(CheckpointMissing, match="holds no nowhere: the run that wrote this"):
        make_engine(policy(), ADAM).load(tmp_path / "nowhere")


def test_a_request_for_an_optimizer_that_was_not_saved_is_refused(tmp_path):
    """Otherwise the run would silently continue with a new optimizer and schedule."""
    engine = make_engine(policy(), ADAM)
    train(engine)
    engine.save(tmp_path, ("model",))
    other = make_engine(policy(seed=9), ADAM)
    with pytest.raises(CheckpointMissing, match="saved without extra and optimizer, which"):
        other.load(tmp_path, ("model", "optimizer", "extra"))
    assert not torch.equal(*(next(iter(weights(e).values())) for e in (other, engine)))
    make_engine(policy(seed=9), None).load(tmp_path, ("model", "optimizer", "extra"))
    other.load(tmp_path, ("model",))
    engine.save(tmp_path / "extra", ("model", "extra"))
    other.load(tmp_path / "extra", ("model", "extra"))
    assert other.optimizer.updates == 1


def test_an_engine_without_optimizer_loads_the_weights(tmp_path):
    engine = make_engine(policy(), ADAM)
    train(engine)
    engine.save(tmp_path, CONTENTS)
    reference = make_engine(policy(seed=9), None)
    reference.load(tmp_path)
    assert all(torch.equal(weights(reference)[n], x) for n, x in weights(engine).items())


def test_the_critic_resumes_with_its_head(tmp_path):
    objective = ValueObjective(CriticConfig(loss_agg_mode="token-mean", loss_scale_factor=None))
    engine, other = make_engine(critic(), ADAM), make_engine(critic(seed=4), ADAM)
    engine.train_minibatch(rows(), objective)
    engine.save(tmp_path, CONTENTS)
    other.load(tmp_path)
    assert torch.equal(engine.infer(rows())["values"], other.infer(rows())["values"])
    expected = engine.train_minibatch(rows(), objective)
    assert other.train_minibatch(rows(), objective) == expected


def saved_names(folder):
    return set(FileSystemReader(str(folder)).read_metadata().state_dict_metadata)


def test_of_a_lora_model_only_trained_parameters_are_saved(tmp_path):
    engine = make_engine(ranks.lora_policy(), ADAM)
    train(engine)
    engine.save(tmp_path, CONTENTS)
    names = {name for name in saved_names(tmp_path) if name.startswith("model.")}
    assert names
    assert all(".lora_" in name for name in names)


def test_adapters_are_not_loaded_onto_another_base(tmp_path):
    engine = make_engine(ranks.lora_policy(), ADAM)
    train(engine)
    engine.save(tmp_path, CONTENTS)
    other = ranks.lora_policy()
    with torch.no_grad():
        other.lm.get_input_embeddings().weight[0, 0] += 1e-3
    with pytest.raises(
        BaseModelMismatch, match=r"set model\.path to the model with which the run started"
    ):
        make_engine(other, ADAM).load(tmp_path)


def test_a_critic_with_adapters_keeps_its_head(tmp_path):
    def lora_critic():
        model = critic()
        torch.manual_seed(0)
        model.lm = wrap_lora(model.lm, AdapterSettings(**ranks.LORA))
        return model

    engine = make_engine(lora_critic(), ADAM)
    objective = ValueObjective(CriticConfig(loss_agg_mode="token-mean", loss_scale_factor=None))
    engine.train_minibatch(rows(), objective)
    engine.save(tmp_path, CONTENTS)
    assert any("value_head" in name for name in saved_names(tmp_path))
    other = make_engine(lora_critic(), ADAM)
    other.load(tmp_path)
    assert torch.equal(engine.infer(rows())["values"], other.infer(rows())["values"])


OTHERS = {
    "biases would be dropped": (
        policy,
        lambda: policy(family="llama"),
        r"has the additional .*bias \(and 5",
    ),
    "biases are missing": (
        lambda: policy(family="llama"),
        policy,
        r"has no .*k_proj\.bias \(and 5 more",
    ),
    "more heads": (policy, lambda: policy(kv_heads=4), r"shape \[16, 32\] there and \[32, 32\]"),
    "fewer layers": (policy, lambda: policy(layers=1), r"additional lm\.model\.layers\.1\."),
    "tied": (lambda: policy(tie_embeddings=False), policy, r"the additional lm\.lm_head\.weight"),
    "untied": (policy, lambda: policy(tie_embeddings=False), r"has no lm\.lm_head\.weight"),
    "rank": (ranks.lora_policy, lambda: ranks.lora_policy(rank=8), r"shape \[4, 32\] there"),
    "targets": (
        ranks.lora_policy,
        lambda: ranks.lora_policy(target_modules=("q_proj",)),
        "has the additional",
    ),
    "no adapters": (ranks.lora_policy, policy, "with LoRA adapters, this run without them"),
    "adapters": (policy, ranks.lora_policy, "without LoRA adapters, this run with them"),
    "a critic": (policy, critic, r"has no value_head\..*additional lm\.lm_head"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_model_is_refused_before_anything_is_read(name, tmp_path):
    make, make_other, message = OTHERS[name]
    engine = make_engine(make(), ADAM)
    train(engine)
    engine.save(tmp_path, CONTENTS)
    other = make_engine(make_other(), ADAM)
    before = weights(other)
    with pytest.raises(ModelMismatch, match=message) as caught:
        other.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert "set model.path" in str(caught.value)
    assert all(torch.equal(weights(other)[n], x) for n, x in before.items())


@pytest.mark.parametrize(
    ("first", "then"), [(MOMENTUM, ADAM), (ADAM, SGD)], ids=["to-adam", "to-sgd"]
)
def test_the_state_of_another_optimizer_is_refused_and_can_be_skipped(first, then, tmp_path):
    engine = make_engine(policy(), first)
    train(engine)
    engine.save(tmp_path, CONTENTS)
    other = make_engine(policy(seed=9), then)
    with pytest.raises(CheckpointMissing, match="saved with another optimizer than this run's"):
        other.load(tmp_path)
    other.load(tmp_path, ("model", "extra"))
    assert all(torch.equal(weights(other)[n], x) for n, x in weights(engine).items())
