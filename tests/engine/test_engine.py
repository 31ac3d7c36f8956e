"""The normalisation law: loss, gradient and weights of an update do not depend on how it is cut."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.families.tiny import randomise, tiny_config
from hone.algorithms.aggregation import MODES
from hone.algorithms.policy_losses import TABLE
from hone.columns import MissingColumn
from hone.config.actor import CriticConfig
from hone.engine.engine import _stand_in
from hone.engine.microbatch import MicroBatchRule
from hone.models.policy import PolicyModel
from hone.protocol import PADDED_ROW, DataProto
from hone.workers.objectives import (
    PolicyObjective,
    SupervisedObjective,
    ValueObjective,
    counted_tokens,
)

from .batches import ROWS, VOCABULARY, rows
from .engines import ALL, SGD, actor, critic, engine, policy, weights

CUTS = {
    "one row at a time": {"rule": MicroBatchRule(rows=1, tokens=0)},
    "three rows at a time": {"rule": MicroBatchRule(rows=3, tokens=0)},
    "by tokens": {"rule": MicroBatchRule(rows=None, tokens=16)},
    "whole rows": {"share": False},
    "wider padding": {"prompt_pad": 3, "response_pad": 5},
}


def update(objective, make=policy, *, prompt_pad=0, response_pad=0, batch=None, **cut):
    """Metrics of one SGD update and the weights after it."""
    made = engine(make(), SGD, **cut)
    before = weights(made)
    batch = batch or rows(prompt_pad=prompt_pad, response_pad=response_pad)
    metrics = made.train_minibatch(batch, objective)
    return metrics, weights(made), before


def assert_same(found, expected, rel=1e-5):
    metrics, after = found[:2]
    reference, wanted, before = expected
    assert set(metrics) == set(reference)
    for name, value in reference.items():
        assert metrics[name] == pytest.approx(value, rel=rel, abs=1e-7), name
    for name, tensor in wanted.items():
        step, rounding = (tensor - before[name]).norm(), 2e-7 * tensor.norm()
        assert (after[name] - tensor).norm() < rel * step + rounding, name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TABLE.names())
def test_every_policy_loss_keeps_the_law_under_every_aggregation(name, mode):
    objective = PolicyObjective(
        actor(name, loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=0.3, entropy_coeff=0.05),
        temperature=0.8,
    )
    expected = update(objective)
    assert expected[0]["grad_norm"] > 1e-4
    assert abs(expected[0]["actor/pg_loss"]) > 1e-6
    for cut in CUTS.values():
        assert_same(update(objective, **cut), expected)


@pytest.mark.parametrize("name", TABLE.names())
def test_the_order_in_which_ranks_hold_the_rows_changes_nothing(name):
    objective = PolicyObjective(actor(name), temperature=0.8)
    whole = rows()
    whole.batch["step_row"] = torch.arange(len(whole))
    moved = whole.select_idxs([3, 1, 5, 0, 6, 2, 4])
    assert_same(update(objective, batch=moved), update(objective, batch=whole))


@pytest.mark.parametrize("mode", MODES)
def test_the_value_loss_keeps_the_law(mode):
    objective = ValueObjective(
        CriticConfig(loss_agg_mode=mode, cliprange_value=0.5, loss_scale_factor=None)
    )
    expected = update(objective, critic)
    assert expected[0]["grad_norm"] > 1e-4
    for cut in CUTS.values():
        assert_same(update(objective, critic, **cut), expected)


def test_the_supervised_loss_keeps_the_law_and_is_the_mean_over_tokens():
    expected = update(SupervisedObjective())
    for cut in CUTS.values():
        assert_same(update(SupervisedObjective(), **cut), expected)
    batch = rows()
    mask = batch.batch["response_mask"].bool()
    log_probs = engine(policy()).infer(batch, temperature=1.0)["log_probs"]
    assert expected[0]["train/loss"] == pytest.approx(-log_probs[mask].mean().item(), rel=1e-5)


@pytest.mark.parametrize("name", ["vanilla", "clip_cov", "kl_cov"])
def test_rows_that_only_even_out_the_ranks_teach_nothing(name):
    objective = PolicyObjective(actor(name), temperature=1.0)
    batch = rows()
    grown = batch.select_idxs([0, 1, 2, 2, 3, 4, 5, 6, 0])
    marks = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0, 1], dtype=torch.bool)
    grown.set_column(PADDED_ROW, marks)
    assert_same(update(objective, batch=grown), update(objective))


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


def test_environment_tokens_have_no_say_in_loss_gradient_or_metrics():
    objective = PolicyObjective(actor(use_kl_loss=True), temperature=1.0)
    dirty = rows()
    foreign = dirty.batch["response_mask"] == 0
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        dirty.batch[name][foreign] = 1e6
    expected = update(objective)
    found = update(objective, batch=dirty)
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], x) for name, x in expected[1].items())


def test_nan_outside_the_mask_never_reaches_the_weights():
    dirty = rows(response_pad=2)
    foreign = dirty.batch["response_mask"] == 0
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        dirty.batch[name][foreign] = float("nan")
    config = actor(use_kl_loss=True)
    metrics, after, _ = update(PolicyObjective(config, temperature=1.0), batch=dirty)
    assert metrics["skipped_updates"] == 0
    assert all(torch.isfinite(x).all() for x in after.values())


def test_a_failed_update_leaves_no_gradient_behind():
    made = engine(policy(), rule=MicroBatchRule(rows=3, tokens=0))
    objective = PolicyObjective(actor(), temperature=1.0)

    class Failing(PolicyObjective):
        calls = 0

        def __call__(self, outputs, batch):
            self.calls += 1
            if self.calls == 3:
                raise RuntimeError("out of memory")
            return super().__call__(outputs, batch)

    with pytest.raises(RuntimeError, match="out of memory"):
        made.train_minibatch(rows(), Failing(actor(), temperature=1.0))
    metrics = made.train_minibatch(rows(), objective)
    expected = update(objective, rule=MicroBatchRule(rows=3, tokens=0))
    assert_same((metrics, weights(made)), expected)


@pytest.mark.parametrize("cut", CUTS)
def test_inference_gives_rows_back_in_order_however_cut(cut):
    options = dict(CUTS[cut])
    pads = {k: options.pop(k) for k in ("prompt_pad", "response_pad") if k in options}
    expected = engine(policy()).infer(rows(), temperature=0.7, with_entropy=True)
    found = engine(policy(), **options).infer(rows(**pads), temperature=0.7, with_entropy=True)
    width = expected["log_probs"].shape[1]
    for name, values in expected.items():
        torch.testing.assert_close(found[name][:, :width], values, rtol=1e-5, atol=1e-6)
        assert (found[name][:, width:] == 0).all()


def test_inference_makes_no_gradient_and_no_rows_give_no_rows():
    made = engine(policy())
    out = made.infer(rows(), temperature=1.0)
    assert not out["log_probs"].requires_grad
    nobody = made.infer(rows().select_idxs([]), temperature=1.0)
    assert nobody["log_probs"].shape == (0, out["log_probs"].shape[1])


def test_means_are_weighted_by_tokens_and_maxima_are_the_largest():
    from hone.engine.contract import Terms

    class Probe:
        options: ClassVar = {"temperature": 1.0}
        needs_batch_statistics = False
        reads = ("advantages", "response_mask")

        def mask(self, batch):
            return counted_tokens(batch, "response_mask")

        def prepare(self, outputs, batch):
            return {}

        def __call__(self, outputs, batch):
            advantages, mask = batch.batch["advantages"], self.mask(batch).bool()
            kept = advantages[mask]
            mean = kept.mean() if len(kept) else 0.0
            zero = outputs["log_probs"].sum() * 0
            peak = kept.max() if len(kept) else -1e9
            return Terms(zero, {"sum": kept.sum()}, {"mean": mean}, {"peak": peak})

    batch = rows()
    kept = batch.batch["advantages"][batch.batch["response_mask"].bool()]
    for cut in (ALL, MicroBatchRule(rows=1, tokens=0)):
        found = engine(policy(), rule=cut).train_minibatch(batch, Probe())
        assert found["mean"] == pytest.approx(kept.mean().item(), rel=1e-5)
        assert found["sum"] == pytest.approx(kept.sum().item(), rel=1e-5)
        assert found["peak"] == kept.max().item()


def test_prepared_columns_do_not_stay_on_the_callers_batch():
    batch = rows()
    before = set(batch.batch.keys())
    engine(policy()).train_minibatch(batch, PolicyObjective(actor("kl_cov"), temperature=1.0))
    assert set(batch.batch.keys()) == before
    assert isinstance(batch, DataProto)


class Watching(PolicyObjective):
    """Remembers which columns its micro-batches carried."""

    def __call__(self, outputs, batch):
        self.carried = set(batch.batch.keys())
        return super().__call__(outputs, batch)


def test_a_micro_batch_carries_what_its_objective_reads_and_nothing_else():
    batch = rows()
    batch.set_column("returns", torch.zeros_like(batch.batch["advantages"]))
    watching = Watching(actor("kl_cov", use_kl_loss=True), temperature=1.0)
    engine(policy()).train_minibatch(batch, watching)
    prepared = {name for name in watching.carried if name.startswith("prepared/")}
    assert prepared
    assert watching.carried - prepared <= set(watching.reads)
    assert {"advantages", "old_log_probs", "ref_log_prob"} <= watching.carried
    plain = Watching(actor(), temperature=1.0)
    engine(policy()).train_minibatch(batch, plain)
    assert "ref_log_prob" not in plain.carried


def test_a_missing_column_names_its_writer():
    batch = rows()
    batch.batch.pop("ref_log_prob")
    objective = PolicyObjective(actor(use_kl_loss=True), temperature=1.0)
    with pytest.raises(MissingColumn, match="ref_log_prob"):
        engine(policy()).train_minibatch(batch, objective)


def test_the_critic_learns_from_what_the_policys_loss_rejects():
    objective = ValueObjective(CriticConfig(loss_agg_mode="token-mean", loss_scale_factor=None))
    narrowed = rows()
    narrowed.set_column("loss_mask", torch.zeros_like(narrowed.batch["response_mask"]))
    assert_same(update(objective, critic, batch=narrowed), update(objective, critic))


def test_the_row_of_a_rank_without_rows_replays_no_experts():
    config = tiny_config("qwen3_moe")
    config.vocab_size = VOCABULARY
    lm = AutoModelForCausalLM.from_config(config)
    randomise(lm)
    module = PolicyModel(lm)
    module.record_routing()
    made, batch = engine(module, None), rows()
    shape = *batch.batch["attention_mask"].shape, 2, 2
    row = _stand_in(batch)
    own = made.infer(row, temperature=1.0, with_routing=True)["routed_experts"]
    batch.batch["routed_experts"] = torch.full(shape, 3, dtype=torch.int16)
    found = made.infer(_stand_in(batch), temperature=1.0, with_routing=True)["routed_experts"]
    assert torch.equal(found, own)
