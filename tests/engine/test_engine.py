"""The normalisation law: loss, gradient and weights of an update do not depend on the micro-batches."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.families.tiny import randomise, tiny_config
from hone.algorithms.policy_losses import TABLE
from hone.algorithms.policy_losses.policy_loss import LOSS_AGG_MODES
from hone.columns import MissingColumn
from hone.config.actor import CriticConfig
from hone.engine.engine import _dummy_row
from hone.models.policy import PolicyModel
from hone.models.tiny import character_tokenizer
from hone.ops.rows import MicroBatchRule
from hone.protocol import PADDED_ROW, DataProto
from hone.protocol.padding import zero_padded_rows
from hone.workers.actor import PolicyObjective
from hone.workers.critic import ValueObjective
from hone.workers.objectives import SupervisedObjective

from .batches import ROWS, VOCABULARY, rows
from .engines import ALL, SGD, actor, critic, make_engine, policy, weights

SPLITS = {
    "one row at a time": {"rule": MicroBatchRule(rows=1, tokens=0)},
    "three rows at a time": {"rule": MicroBatchRule(rows=3, tokens=0)},
    "by tokens": {"rule": MicroBatchRule(rows=None, tokens=16)},
    "whole rows": {"share": False},
    "wider padding": {"prompt_pad": 3, "response_pad": 5},
}


def update(objective, make=policy, *, prompt_pad=0, response_pad=0, batch=None, **split):
    """Returns the metrics of one SGD update, and the weights after and before it."""
    engine = make_engine(make(), SGD, **split)
    before = weights(engine)
    batch = batch or rows(prompt_pad=prompt_pad, response_pad=response_pad)
    metrics = engine.train_minibatch(batch, objective)
    return metrics, weights(engine), before


def assert_same(actual, expected, rel=1e-5):
    metrics, after = actual[:2]
    reference, expected_weights, before = expected
    assert set(metrics) == set(reference)
    for name, value in reference.items():
        assert metrics[name] == pytest.approx(value, rel=rel, abs=1e-7), name
    for name, tensor in expected_weights.items():
        step, rounding = (tensor - before[name]).norm(), 2e-7 * tensor.norm()
        assert (after[name] - tensor).norm() < rel * step + rounding, name


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", TABLE.names())
def test_every_policy_loss_keeps_the_law_under_every_aggregation(name, mode):
    objective = PolicyObjective(
        actor(name, loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=0.3, entropy_coeff=0.05),
        temperature=0.8,
    )
    expected = update(objective)
    assert expected[0]["grad_norm"] > 1e-4
    assert abs(expected[0]["actor/pg_loss"]) > 1e-6
    for split in SPLITS.values():
        assert_same(update(objective, **split), expected)


@pytest.mark.parametrize("name", TABLE.names())
def test_the_order_of_the_rows_does_not_matter(name):
    objective = PolicyObjective(actor(name), temperature=0.8)
    batch = rows()
    batch.batch["global_row"] = torch.arange(len(batch))
    shuffled = batch.select_idxs([3, 1, 5, 0, 6, 2, 4])
    assert_same(update(objective, batch=shuffled), update(objective, batch=batch))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_value_loss_keeps_the_law(mode):
    objective = ValueObjective(
        CriticConfig(loss_agg_mode=mode, cliprange_value=0.5, loss_scale_factor=None)
    )
    expected = update(objective, critic)
    assert expected[0]["grad_norm"] > 1e-4
    for split in SPLITS.values():
        assert_same(update(objective, critic, **split), expected)


def test_the_supervised_loss_keeps_the_law_and_is_the_mean_over_tokens():
    expected = update(SupervisedObjective())
    for split in SPLITS.values():
        assert_same(update(SupervisedObjective(), **split), expected)
    batch = rows()
    mask = batch.batch["response_mask"].bool()
    log_probs = make_engine(policy()).infer(batch, temperature=1.0)["log_probs"]
    assert expected[0]["train/loss"] == pytest.approx(-log_probs[mask].mean().item(), rel=1e-5)


@pytest.mark.parametrize("name", ["vanilla", "clip_cov", "kl_cov"])
def test_padded_rows_do_not_change_the_update(name):
    objective = PolicyObjective(actor(name), temperature=1.0)
    batch = rows()
    padded = batch.select_idxs([0, 1, 2, 2, 3, 4, 5, 6, 0])
    is_padding = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
    padded.set_column(PADDED_ROW, is_padding)
    assert_same(update(objective, batch=padded), update(objective))


def test_a_loss_mask_narrows_the_loss_and_may_be_boolean():
    objective = PolicyObjective(actor(), temperature=1.0)
    batch = rows()
    narrowed = batch.batch["response_mask"].bool()
    narrowed[0] = False
    with_mask = rows()
    with_mask.set_column("loss_mask", narrowed)
    with_mask.set_column(PADDED_ROW, torch.tensor([False] * (len(ROWS) - 1) + [True]))
    assert objective.mask(with_mask).sum() == narrowed[:-1].sum()
    without = batch.select_idxs(list(range(1, len(ROWS) - 1)))
    assert_same(update(objective, batch=with_mask), update(objective, batch=without))


def test_tool_tokens_do_not_change_loss_gradient_or_metrics():
    objective = PolicyObjective(actor(use_kl_loss=True), temperature=1.0)
    batch = rows()
    outside_mask = batch.batch["response_mask"] == 0
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        batch.batch[name][outside_mask] = 1e6
    expected = update(objective)
    actual = update(objective, batch=batch)
    assert actual[0] == expected[0]
    assert all(torch.equal(actual[1][name], x) for name, x in expected[1].items())


def test_nan_outside_the_mask_never_reaches_the_weights():
    batch = rows(response_pad=2)
    outside_mask = batch.batch["response_mask"] == 0
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        batch.batch[name][outside_mask] = float("nan")
    config = actor(use_kl_loss=True)
    metrics, after, _ = update(PolicyObjective(config, temperature=1.0), batch=batch)
    assert metrics["skipped_updates"] == 0
    assert all(torch.isfinite(x).all() for x in after.values())


def test_a_failed_update_leaves_no_gradient_behind():
    engine = make_engine(policy(), rule=MicroBatchRule(rows=3, tokens=0))
    objective = PolicyObjective(actor(), temperature=1.0)

    class Failing(PolicyObjective):
        calls = 0

        def __call__(self, outputs, batch):
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("out of memory")
            return super().__call__(outputs, batch)

    with pytest.raises(RuntimeError, match="out of memory"):
        engine.train_minibatch(rows(), Failing(actor(), temperature=1.0))
    metrics = engine.train_minibatch(rows(), objective)
    expected = update(objective, rule=MicroBatchRule(rows=3, tokens=0))
    assert_same((metrics, weights(engine)), expected)


@pytest.mark.parametrize("split", SPLITS)
def test_inference_keeps_the_order_of_rows_under_every_split(split):
    options = dict(SPLITS[split])
    pads = {k: options.pop(k) for k in ("prompt_pad", "response_pad") if k in options}
    expected = make_engine(policy()).infer(rows(), temperature=0.7, with_entropy=True)
    actual = make_engine(policy(), **options).infer(
        rows(**pads), temperature=0.7, with_entropy=True
    )
    width = expected["log_probs"].shape[1]
    for name, values in expected.items():
        torch.testing.assert_close(actual[name][:, :width], values, rtol=1e-5, atol=1e-6)
        assert (actual[name][:, width:] == 0).all()


def test_inference_has_no_gradient_and_accepts_an_empty_batch():
    engine = make_engine(policy())
    out = engine.infer(rows(), temperature=1.0)
    assert not out["log_probs"].requires_grad
    empty = engine.infer(rows().select_idxs([]), temperature=1.0)
    assert empty["log_probs"].shape == (0, out["log_probs"].shape[1])


def test_means_are_weighted_by_tokens_and_maxima_are_the_largest():
    from hone.engine.contract import ObjectiveOutput

    class Probe:
        options: ClassVar = {"temperature": 1.0}
        needs_batch_statistics = False
        reads = ("advantages", "response_mask")

        def mask(self, batch):
            return zero_padded_rows(batch.batch["response_mask"], batch)

        def prepare(self, outputs, batch):
            return {}

        def __call__(self, outputs, batch):
            advantages, mask = batch.batch["advantages"], self.mask(batch).bool()
            values = advantages[mask]
            mean = values.mean() if len(values) else 0.0
            zero = outputs["log_probs"].sum() * 0
            peak = values.max() if len(values) else -1e9
            return ObjectiveOutput(zero, {"sum": values.sum()}, {"mean": mean}, {"peak": peak})

    batch = rows()
    values = batch.batch["advantages"][batch.batch["response_mask"].bool()]
    for split in (ALL, MicroBatchRule(rows=1, tokens=0)):
        actual = make_engine(policy(), rule=split).train_minibatch(batch, Probe())
        assert actual["mean"] == pytest.approx(values.mean().item(), rel=1e-5)
        assert actual["sum"] == pytest.approx(values.sum().item(), rel=1e-5)
        assert actual["peak"] == values.max().item()


def test_prepared_columns_do_not_stay_on_the_callers_batch():
    batch = rows()
    before = set(batch.batch.keys())
    make_engine(policy()).train_minibatch(batch, PolicyObjective(actor("kl_cov"), temperature=1.0))
    assert set(batch.batch.keys()) == before
    assert isinstance(batch, DataProto)


class RecordingObjective(PolicyObjective):
    """Records the columns of its micro-batches."""

    def __call__(self, outputs, batch):
        self.columns = set(batch.batch.keys())
        return super().__call__(outputs, batch)


def test_a_micro_batch_has_only_the_columns_that_its_objective_reads():
    batch = rows()
    batch.set_column("returns", torch.zeros_like(batch.batch["advantages"]))
    recording = RecordingObjective(actor("kl_cov", use_kl_loss=True), temperature=1.0)
    make_engine(policy()).train_minibatch(batch, recording)
    prepared = {name for name in recording.columns if name.startswith("prepared/")}
    assert prepared
    assert recording.columns - prepared <= set(recording.reads)
    assert {"advantages", "old_log_probs", "ref_log_prob"} <= recording.columns
    plain = RecordingObjective(actor(), temperature=1.0)
    make_engine(policy()).train_minibatch(batch, plain)
    assert "ref_log_prob" not in plain.columns


def test_a_missing_column_names_its_writer():
    batch = rows()
    batch.batch.pop("ref_log_prob")
    objective = PolicyObjective(actor(use_kl_loss=True), temperature=1.0)
    with pytest.raises(MissingColumn, match="ref_log_prob"):
        make_engine(policy()).train_minibatch(batch, objective)


def test_the_critic_trains_on_tokens_that_the_loss_mask_rejects():
    objective = ValueObjective(CriticConfig(loss_agg_mode="token-mean", loss_scale_factor=None))
    narrowed = rows()
    narrowed.set_column("loss_mask", torch.zeros_like(narrowed.batch["response_mask"]))
    assert_same(update(objective, critic, batch=narrowed), update(objective, critic))


def test_the_dummy_row_of_a_rank_without_rows_replays_no_experts():
    config = tiny_config("qwen3_moe")
    config.vocab_size = VOCABULARY
    lm = AutoModelForCausalLM.from_config(config)
    randomise(lm)
    module = PolicyModel(lm)
    module.enable_routing()
    engine, batch = make_engine(module, None), rows()
    shape = *batch.batch["attention_mask"].shape, 2, 2
    row = _dummy_row(batch)
    by_router = engine.infer(row, temperature=1.0, with_routing=True)["routed_experts"]
    batch.batch["routed_experts"] = torch.full(shape, 3, dtype=torch.int16)
    actual = engine.infer(_dummy_row(batch), temperature=1.0, with_routing=True)["routed_experts"]
    assert torch.equal(actual, by_router)


def test_weights_carry_their_hugging_face_names():
    engine = make_engine(policy(tie_embeddings=False))
    assert set(weights(engine)) == set(engine.module.lm.state_dict())


def test_facts_are_those_of_the_whole_model():
    engine = make_engine(policy())
    parameters = list(engine.module.lm.parameters())
    assert engine.model_facts.parameters == sum(p.numel() for p in parameters)
    assert engine.model_facts.parameter_bytes == 4 * engine.model_facts.parameters
    assert not engine.model_facts.has_adapters


def test_a_lease_lends_the_policy_in_eval_mode_and_a_critic_has_none():
    engine = make_engine(policy())
    engine.module.train()
    with engine.lease() as lease:
        assert lease.policy is engine.module
        assert not engine.module.training
    with pytest.raises(TypeError, match="ValueModel does not decode"):
        make_engine(critic()).lease().__enter__()


def test_an_export_opens_with_transformers(tmp_path):
    engine = make_engine(policy())
    engine.export(tmp_path, character_tokenizer("0123456789"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    state = exported.state_dict()
    assert all(state[name].equal(tensor) for name, tensor in weights(engine).items())
