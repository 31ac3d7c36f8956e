"""The workers of the policy, the updates of one step, and the utilization of the GPU."""

from __future__ import annotations

import pytest
import torch

from hone.engine.contract import ModelFacts
from hone.protocol import DataProto
from hone.workers.actor import ActorWorker, ReferenceWorker, Roofline, end_updates
from tests.workers.tasks import config_of, write_model


class FakeEngine:
    """Counts the steps of its schedule."""

    steps = 0

    def advance_schedule(self):
        self.steps += 1


def test_the_schedule_advances_once_per_step_and_optimizer_metrics_have_the_role():
    engine = FakeEngine()
    update = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.5, "skipped_updates": 1.0}
    updates = [update, update | {"loss": 4.0, "skipped_updates": 2.0}]
    metrics = end_updates(engine, "actor", updates)
    assert engine.steps == 1
    assert metrics == {
        "loss": 3.0,
        "actor/grad_norm": 1.0,
        "actor/lr": 0.5,
        "actor/skipped_updates": 2.0,
    }


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


def test_the_policy_loss_may_have_an_aggregation_of_its_own(model):
    actor_key = "actor_rollout_ref.actor"

    def policy_loss(*modes):
        overrides = [f"{actor_key}.{mode}" for mode in modes]
        batch = policy_batch()
        batch.batch["response_mask"][0, 1:] = 0  # rows of different lengths: the means differ
        actor = make_worker(ActorWorker, config_of(model, *overrides))
        return actor.update_actor(batch).meta_info["metrics"]["actor/pg_loss"]

    by_token = policy_loss("loss_agg_mode=token-mean")
    by_sequence = policy_loss("loss_agg_mode=seq-mean-token-mean")
    own = policy_loss("loss_agg_mode=token-mean", "policy_loss.agg_mode=seq-mean-token-mean")
    assert own == by_sequence != by_token


def test_sum_of_squares_is_computed_on_request_only(config):
    actor = make_worker(ActorWorker, config)
    assert "sum_pi_squared" not in actor.compute_log_prob(policy_batch()).column_names()
    out = actor.compute_log_prob(policy_batch(), with_sum_pi_squared=True)
    assert ((out.batch["sum_pi_squared"] > 0) & (out.batch["sum_pi_squared"] <= 1)).all()


FACTS = ModelFacts(
    vocab_size=10,
    max_position_embeddings=None,
    eos_ids=(),
    dtype=torch.float32,
    parameters=100,
    parameter_bytes=400,
    layers=2,
    attention_width=8,
    kv_bytes_per_token=16,
)
ROOFLINE = Roofline(flops_per_s=1000.0, bytes_per_s=50.0, model_facts=FACTS)


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
