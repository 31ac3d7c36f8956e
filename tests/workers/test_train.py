"""The workers with a training engine: their base class, actor and reference, and critic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hone.config import load_config
from hone.engine.contract import ModelFacts
from hone.protocol import DataProto
from hone.tracking.manifest import FolderNotShared
from hone.workers.train import (
    ActorWorker,
    CriticWorker,
    ReferenceWorker,
    Roofline,
    TrainWorker,
    full_config,
)
from tests.workers.tasks import config_of, write_model


class FakeEngine:
    """Counts the steps of its schedule."""

    steps = 0

    def advance_schedule(self):
        self.steps += 1


def test_a_part_of_the_config_is_completed_with_defaults():
    part = config_of(Path("folder")).actor_rollout_ref
    assert full_config(part).actor_rollout_ref is part
    assert full_config(part).trainer == load_config().trainer


def test_another_block_is_refused_by_name():
    with pytest.raises(TypeError, match="not a TrainerConfig"):
        full_config(load_config().trainer)


def test_the_schedule_advances_once_per_step_and_optimizer_metrics_have_the_role():
    worker = TrainWorker(config_of(Path("folder")))
    worker.engine = FakeEngine()
    update = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.5, "skipped_updates": 1.0}
    updates = [update, update | {"loss": 4.0, "skipped_updates": 2.0}]
    metrics = worker.end_updates("actor", updates)
    assert worker.engine.steps == 1
    assert metrics == {
        "loss": 3.0,
        "actor/grad_norm": 1.0,
        "actor/lr": 0.5,
        "actor/skipped_updates": 2.0,
    }


def test_a_rank_that_does_not_see_the_folder_of_the_checkpoint_writes_nothing(tmp_path: Path):
    worker = TrainWorker(config_of(tmp_path))
    folder = tmp_path / "run" / ".global_step_1.tmp" / "actor"  # of another machine's disk
    with pytest.raises(
        FolderNotShared, match=r"rank 0 on .* does not see .*\.global_step_1\.tmp, .*same"
    ):
        worker.save_checkpoint(str(folder))
    assert list(tmp_path.iterdir()) == []


# -- actor and reference


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def config(model):
    return config_of(model)


def policy_batch():
    """Returns four rows with prompts of two tokens and responses of three."""
    ids = torch.randint(3, 12, (4, 5), generator=torch.Generator().manual_seed(2))
    return DataProto.from_dict(
        {
            "prompts": ids[:, :2],
            "responses": ids[:, 2:],
            "attention_mask": torch.ones(4, 5, dtype=torch.int64),
            "response_mask": torch.ones(4, 3, dtype=torch.int64),
            "advantages": torch.tensor([[1.0], [-1.0], [0.5], [-0.5]]).expand(4, 3).clone(),
        }
    )


def make_worker(cls, config):
    worker = cls(config)
    worker.init_model()
    return worker


def test_actor_and_reference_start_from_the_same_policy(config):
    log_probs = (
        make_worker(ActorWorker, config).compute_log_prob(policy_batch()).batch["old_log_probs"]
    )
    reference = make_worker(ReferenceWorker, config).compute_ref_log_prob(policy_batch())
    assert torch.equal(reference.batch["ref_log_prob"], log_probs)


def test_an_update_raises_log_probs_with_positive_advantage_and_names_metrics_by_role(config):
    actor = make_worker(ActorWorker, config)
    before = actor.compute_log_prob(policy_batch()).batch["old_log_probs"]
    metrics = actor.update_actor(policy_batch()).meta_info["metrics"]
    change = actor.compute_log_prob(policy_batch()).batch["old_log_probs"] - before
    assert (change * policy_batch().batch["advantages"]).mean() > 0
    assert {"actor/pg_loss", "actor/lr", "actor/grad_norm", "actor/entropy"} <= metrics.keys()
    assert actor.version() == 1


def test_sum_of_squares_is_computed_on_request_only(config):
    actor = make_worker(ActorWorker, config)
    assert "sum_pi_squared" not in actor.compute_log_prob(policy_batch()).column_names()
    out = actor.compute_log_prob(policy_batch(), with_sum_pi_squared=True)
    assert ((out.batch["sum_pi_squared"] > 0) & (out.batch["sum_pi_squared"] <= 1)).all()


# -- critic


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


FACTS = ModelFacts(
    vocabulary=10,
    max_position_embeddings=None,
    eos_ids=(),
    dtype=torch.float32,
    parameters=100,
    parameter_bytes=400,
    layers=2,
    attention_width=8,
    kv_bytes_per_token=16,
)
ROOFLINE = Roofline(flops_per_s=1000.0, bytes_per_s=50.0, facts=FACTS)


def test_an_update_counts_six_operations_per_parameter_and_token_and_attention_over_pairs():
    expected = (6 * 100 * 4 + 6 * 8 * 2 * 4 * 4) / 2.0 / 1000
    assert ROOFLINE.mfu([4], [0], seconds=2.0) == pytest.approx(expected)


def test_a_shared_prompt_is_counted_once():
    alone = ROOFLINE.mfu([4], [0], seconds=1.0)
    assert ROOFLINE.mfu([4, 4], [0, 4], seconds=1.0) == pytest.approx(alone)


def test_generation_reads_the_weights_once_per_decode_step_and_keys_once_per_token():
    read = 3 * 400 + 3 * (5 + 3 / 2) * 16
    share = ROOFLINE.mbu([5], [3], max_num_seqs=8, seconds=2.0)
    assert share == pytest.approx(read / 2.0 / 50)


def test_a_cpu_has_no_roofline():
    assert Roofline.for_device(FACTS, torch.device("cpu")) is None
