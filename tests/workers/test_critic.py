"""The critic learns values, and its metrics have verl's names."""

from __future__ import annotations

import pytest
import torch

from hone.workers.critic import CriticWorker
from tests.workers.tasks import config_of, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def make_critic(model, *overrides):
    critic = CriticWorker(config_of(model, *overrides))
    critic.init_model()
    return critic


@pytest.fixture
def batch():
    from tests.engine.batches import rows

    batch = rows()
    batch.batch["prompts"] %= 20
    batch.batch["responses"] %= 20
    return batch


def test_values_start_at_zero_and_approach_the_returns(model, batch):
    critic = make_critic(model)
    mask = batch.batch["response_mask"].bool()
    values = critic.compute_values(batch).batch["values"]
    assert values.shape == mask.shape
    assert (values == 0).all()
    batch.batch["values"] = values
    losses = [critic.update_critic(batch).meta_info["metrics"]["critic/vf_loss"] for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    values = critic.compute_values(batch).batch["values"]
    assert (values[~mask] == 0).all()
    assert (values[mask] != 0).all()


def test_metrics_have_verls_names(model, batch):
    metrics = make_critic(model).update_critic(batch).meta_info["metrics"]
    assert {
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/vpred_mean",
        "critic/grad_norm",
        "critic/lr",
        "critic/skipped_updates",
    } == set(metrics)
    assert metrics["critic/lr"] == 1e-2


def test_the_critic_trains_on_tokens_that_the_loss_mask_rejects(model, batch):
    expected = make_critic(model).update_critic(batch).meta_info["metrics"]
    batch.batch["loss_mask"] = torch.zeros_like(batch.batch["response_mask"])
    assert make_critic(model).update_critic(batch).meta_info["metrics"] == expected
    assert expected["critic/vf_loss"] > 0
    assert batch.has_column("loss_mask")


@pytest.mark.parametrize(
    "setting",
    [
        "critic.ppo_micro_batch_size_per_gpu=1",
        "critic.ppo_micro_batch_size=2",
        "critic.model.enable_gradient_checkpointing=true",
    ],
)
def test_memory_settings_do_not_change_the_update(model, batch, setting):
    plain, other = make_critic(model), make_critic(model, setting)
    recomputes = "gradient_checkpointing" in setting
    assert other.engine.module.lm.is_gradient_checkpointing == recomputes
    for _ in range(2):
        expected = plain.update_critic(batch).meta_info["metrics"]
        actual = other.update_critic(batch).meta_info["metrics"]
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_with_lora_only_adapters_and_the_head_are_trained(model, batch):
    critic = make_critic(model, "critic.model.lora_rank=4")
    before = {n: p.clone() for n, p in critic.engine.module.named_parameters()}
    for _ in range(2):
        critic.update_critic(batch)
    for name, parameter in critic.engine.module.named_parameters():
        is_trained = "lora_" in name or name.startswith("value_head")
        assert torch.equal(parameter, before[name]) != is_trained, name


def test_a_checkpoint_resumes(model, batch, tmp_path):
    critic, other = make_critic(model), make_critic(model)
    critic.update_critic(batch)
    critic.save_checkpoint(str(tmp_path))
    expected = critic.update_critic(batch).meta_info["metrics"]
    other.load_checkpoint(str(tmp_path))
    assert other.update_critic(batch).meta_info["metrics"] == expected
