"""The critic's worker: values, their update, checkpoints."""

from __future__ import annotations

import pytest
import torch

from hone.workers.critic import CriticWorker
from tests.workers.tasks import config_of, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def critic(model, *overrides):
    one = CriticWorker(config_of(model, *overrides))
    one.init_model()
    return one


@pytest.fixture
def batch():
    from tests.engine.batches import rows

    made = rows()
    made.batch["prompts"] %= 20
    made.batch["responses"] %= 20
    return made


def test_values_start_at_zero_and_come_to_the_returns(model, batch):
    one = critic(model)
    mask = batch.batch["response_mask"].bool()
    values = one.compute_values(batch).batch["values"]
    assert values.shape == mask.shape
    assert (values == 0).all()
    batch.batch["values"] = values
    losses = [one.update_critic(batch).meta_info["metrics"]["critic/vf_loss"] for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    values = one.compute_values(batch).batch["values"]
    assert (values[~mask] == 0).all()
    assert (values[mask] != 0).all()


def test_metrics_carry_the_familys_names(model, batch):
    metrics = critic(model).update_critic(batch).meta_info["metrics"]
    assert {
        "critic/vf_loss",
        "critic/vf_clipfrac",
        "critic/vpred_mean",
        "critic/grad_norm",
        "critic/lr",
        "critic/skipped_updates",
    } == set(metrics)
    assert metrics["critic/lr"] == 1e-2


def test_what_the_policys_loss_rejects_still_teaches_the_critic(model, batch):
    expected = critic(model).update_critic(batch).meta_info["metrics"]
    batch.batch["loss_mask"] = torch.zeros_like(batch.batch["response_mask"])
    assert critic(model).update_critic(batch).meta_info["metrics"] == expected
    assert expected["critic/vf_loss"] > 0
    assert batch.has_column("loss_mask")


@pytest.mark.parametrize(
    "cut",
    [
        "critic.ppo_micro_batch_size_per_gpu=1",
        "critic.ppo_micro_batch_size=2",
        "critic.model.enable_gradient_checkpointing=true",
    ],
)
def test_settings_of_memory_do_not_change_the_update(model, batch, cut):
    plain, other = critic(model), critic(model, cut)
    recomputes = "gradient_checkpointing" in cut
    assert other.engine.module.lm.is_gradient_checkpointing == recomputes
    for _ in range(2):
        expected = plain.update_critic(batch).meta_info["metrics"]
        found = other.update_critic(batch).meta_info["metrics"]
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_with_lora_only_adapters_and_the_head_learn(model, batch):
    one = critic(model, "critic.model.lora_rank=4")
    before = {n: p.clone() for n, p in one.engine.module.named_parameters()}
    for _ in range(2):
        one.update_critic(batch)
    for name, parameter in one.engine.module.named_parameters():
        learns = "lora_" in name or name.startswith("value_head")
        assert torch.equal(parameter, before[name]) != learns, name


def test_a_checkpoint_continues(model, batch, tmp_path):
    one, other = critic(model), critic(model)
    one.update_critic(batch)
    one.save_checkpoint(str(tmp_path))
    expected = one.update_critic(batch).meta_info["metrics"]
    other.load_checkpoint(str(tmp_path))
    assert other.update_critic(batch).meta_info["metrics"] == expected
