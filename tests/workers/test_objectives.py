"""The objective of each role against its formula."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain

import pytest
import torch

from hone.algorithms.policy_losses import TABLE
from hone.algorithms.policy_losses.policy_loss import BatchCounts, agg_loss, batch_counts
from hone.config.actor import CriticConfig
from hone.config.algorithm import RolloutCorrectionConfig
from hone.plugins import PluginError
from hone.protocol import DataProto
from hone.verl.dialect import load_config
from hone.workers.actor import PolicyObjective, mean_metrics, minibatches
from hone.workers.critic import ValueObjective
from hone.workers.objectives import PairObjective, StepObjective
from tests.engine.batches import rows
from tests.engine.engines import actor, make_engine, policy, weights


@pytest.fixture
def outputs():
    """Outputs of a model: log-probs near the old ones, and entropies."""
    batch = rows()
    random = torch.Generator().manual_seed(3)
    old = batch.batch["old_log_probs"]
    log_probs = (old + 0.2 * torch.randn(old.shape, generator=random)).requires_grad_()
    return {"log_probs": log_probs, "entropy": torch.rand(old.shape, generator=random)}


def test_the_policy_objective_is_loss_minus_entropy_plus_kl(outputs):
    batch = rows()
    config = actor(entropy_coeff=0.3, use_kl_loss=True, kl_loss_coef=0.7, kl_loss_type="k2")
    terms = PolicyObjective(config, temperature=1.0)(outputs, batch)
    mask = batch.batch["response_mask"].bool()
    new, old, adv = (
        x[mask]
        for x in (outputs["log_probs"], *(batch.batch[n] for n in ("old_log_probs", "advantages")))
    )
    ratio = (new - old).exp()
    surrogate = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.9, 1.1))
    dual = torch.where(adv < 0, torch.minimum(surrogate, -adv * 1.5), surrogate)
    entropy = outputs["entropy"][mask].mean()
    kl = (0.5 * (new - batch.batch["ref_log_prob"][mask]) ** 2).mean()
    torch.testing.assert_close(terms.loss, dual.mean() - 0.3 * entropy + 0.7 * kl)
    assert float(terms.sums["actor/pg_loss"]) == pytest.approx(dual.mean().item(), rel=1e-5)
    assert float(terms.sums["actor/entropy_loss"]) == pytest.approx(entropy.item(), rel=1e-5)
    assert float(terms.sums["actor/kl_loss"]) == pytest.approx(kl.item(), rel=1e-5)
    assert float(terms.means["actor/entropy"]) == pytest.approx(entropy.item(), rel=1e-5)
    assert float(terms.means["actor/ppo_kl"]) == pytest.approx((old - new).mean().item(), rel=1e-4)


def test_without_coefficients_the_loss_is_the_policy_loss_alone(outputs):
    terms = PolicyObjective(actor(), temperature=1.0)(outputs, rows())
    assert set(terms.sums) == {"actor/pg_loss"}
    torch.testing.assert_close(terms.loss, terms.sums["actor/pg_loss"])


@pytest.mark.parametrize("name", TABLE.names())
def test_without_old_log_probs_the_update_uses_the_current_ones(name):
    """Skipping the log-prob pass equals running it with the same weights."""
    objective = PolicyObjective(actor(name), temperature=0.8)
    with_pass, without = make_engine(policy()), make_engine(policy())
    with_column = rows()
    out = with_pass.infer(with_column, temperature=0.8)
    with_column.batch["old_log_probs"] = out["log_probs"]
    without_column = rows()
    without_column.batch.pop("old_log_probs")
    expected = with_pass.train_minibatch(with_column, objective)
    actual = without.train_minibatch(without_column, objective)
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for tensor, other in zip(weights(without).values(), weights(with_pass).values(), strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-6)


def test_without_old_log_probs_the_gap_to_the_rollout_is_reported(outputs):
    batch = rows()
    old = batch.batch.pop("old_log_probs")
    mask = batch.batch["response_mask"].bool()
    batch.batch["rollout_log_probs"] = old * mask
    terms = PolicyObjective(actor(), temperature=1.0)(outputs, batch)
    gap = (outputs["log_probs"] - old)[mask].detach()
    assert float(terms.means["rollout_corr/kl"]) == pytest.approx(-gap.mean().item(), rel=1e-4)
    k3 = (gap.exp() - gap - 1).mean().item()
    assert float(terms.means["rollout_corr/k3_kl"]) == pytest.approx(k3, rel=1e-3)
    mean_gap = float(terms.means["rollout_corr/log_prob_abs_diff_mean"])
    assert mean_gap == pytest.approx(gap.abs().mean().item(), rel=1e-4)
    assert float(terms.maxima["rollout_corr/log_prob_abs_diff_max"]) == pytest.approx(
        gap.abs().max().item(), rel=1e-5
    )


def test_rollout_weights_scale_each_token(outputs):
    batch = rows()
    batch.batch["rollout_is_weights"] = torch.full_like(batch.batch["advantages"], 0.25)
    plain = PolicyObjective(actor(), temperature=1.0)(outputs, rows())
    weighted = PolicyObjective(actor(), temperature=1.0)(outputs, batch)
    torch.testing.assert_close(weighted.loss, 0.25 * plain.loss)


def test_bypass_mode_uses_the_loss_and_settings_of_the_correction(outputs):
    base = load_config().algorithm.rollout_correction
    assert isinstance(base, RolloutCorrectionConfig)
    correction = replace(base, bypass_mode=True, loss_type="reinforce", rollout_is=None)
    terms = PolicyObjective(actor("gspo"), temperature=1.0, correction=correction)(outputs, rows())
    batch = rows()
    mask = batch.batch["response_mask"].bool()
    expected = -(batch.batch["advantages"] * outputs["log_probs"])[mask].mean()
    torch.testing.assert_close(terms.loss, expected)


def test_the_value_objective_is_the_clipped_squared_error():
    batch = rows()
    mask = batch.batch["response_mask"].bool()
    values = batch.batch["values"] + torch.linspace(-1, 1, mask.numel()).view(mask.shape)
    config = CriticConfig(cliprange_value=0.3, loss_agg_mode="token-mean", loss_scale_factor=None)
    terms = ValueObjective(config)({"values": values}, batch)
    old, returns = batch.batch["values"], batch.batch["returns"]
    clipped = torch.clamp(values, old - 0.3, old + 0.3)
    error = 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
    torch.testing.assert_close(terms.loss, error[mask].mean())
    assert float(terms.means["critic/vpred_mean"]) == pytest.approx(values[mask].mean().item())


def rows_of_updates(numbers=range(7), **options):
    """Returns the row numbers of each mini-batch."""
    batch = DataProto.from_dict({"global_row": torch.tensor([*numbers])})
    settings = {"rows_per_update": 3, "epochs": 1, "shuffle_seed": None} | options
    return [part.batch["global_row"].tolist() for part in minibatches(batch, **settings)]


def test_mini_batches_keep_the_order_of_the_batch():
    assert rows_of_updates(epochs=2) == [[0, 1, 2], [3, 4, 5], [6]] * 2


def test_metrics_of_a_step_are_means_over_its_updates_and_the_largest_count():
    updates = [{"loss": float(k), "skipped_updates": float(k)} for k in range(1, 7)]
    assert mean_metrics(updates) == {"loss": 3.5, "skipped_updates": 6.0}


def test_shuffling_is_by_seed_and_differs_between_epochs():
    updates = rows_of_updates(epochs=2, shuffle_seed=42)
    first, second = [*chain(*updates[:3])], [*chain(*updates[3:])]
    assert updates == rows_of_updates(epochs=2, shuffle_seed=42)
    assert updates != rows_of_updates(epochs=2, shuffle_seed=43)
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("per_update", [1, 3, 4, 7, 12])
def test_a_mini_batch_has_the_same_rows_for_every_distribution_over_ranks(seed, per_update):
    def updates(numbers):
        return rows_of_updates(
            numbers, total_rows=12, rows_per_update=per_update, shuffle_seed=seed
        )

    one_rank = updates([*range(12)])
    assert sorted(chain(*one_rank)) == list(range(12))
    assert all(len(part) == per_update for part in one_rank[:-1])
    for shares in ([[0, 3, 5, 11, 2, 9], [1, 4, 6, 7, 8, 10]], [[7], [*range(7), *range(8, 12)]]):
        by_rank = [updates(numbers) for numbers in shares]
        for k, expected in enumerate(one_rank):
            assert sorted(chain(*(part[k] for part in by_rank))) == sorted(expected)


def test_without_global_rows_each_rank_takes_its_part_of_every_mini_batch():
    assert rows_of_updates(rows_per_update=9, ranks=3) == [[0, 1, 2], [3, 4, 5], [6]]


def scored_batch(mask: list[list[int]], **columns: list[list[float]] | list[float]) -> DataProto:
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    return DataProto.from_dict({"response_mask": torch.tensor(mask), **tensors})


def test_hard_and_soft_labels_give_the_cross_entropy_of_the_two_logits() -> None:
    scores = torch.tensor([[2.0, 9.0], [-1.0, 0.5]], dtype=torch.float64)
    data = scored_batch([[1, 0], [1, 1]], labels=[[1.0, 0.0], [0.0, 0.3]])
    terms = StepObjective()({"scores": scores}, data)
    good = [1 / (1 + math.exp(-x)) for x in (2.0, -1.0, 0.5)]
    by_hand = [
        -math.log(good[0]),
        -math.log(1 - good[1]),
        -0.3 * math.log(good[2]) - 0.7 * math.log(1 - good[2]),
    ]
    assert float(terms.loss) == pytest.approx(sum(by_hand) / 3, rel=1e-12)
    assert by_hand == pytest.approx([0.126928011, 0.313261688, 0.824076984], rel=1e-8)
    assert float(terms.means["train/accuracy"]) == pytest.approx(2 / 3)


def test_the_pair_loss_depends_on_the_score_gap_minus_the_margin() -> None:
    scores = torch.tensor([[0.0, 1.5], [0.5, 7.0], [2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    data = scored_batch([[0, 1], [1, 0], [1, 0], [0, 1]], margin=[0.25, 0.25, 0.0, 0.0])
    terms = PairObjective()({"scores": scores}, data)
    by_hand = [math.log1p(math.exp(-(1.5 - 0.5 - 0.25))), math.log1p(math.exp(-(2.0 - 3.0)))]
    assert by_hand == pytest.approx([0.386871005, 1.313261688], rel=1e-8)
    assert float(terms.loss) == pytest.approx(sum(by_hand) / 2, rel=1e-12)
    assert float(terms.means["train/accuracy"]) == 0.5
    assert float(terms.means["train/score_gap"]) == 0.0


def test_the_shares_of_micro_batches_add_up_to_the_loss_of_the_mini_batch() -> None:
    scores = torch.tensor([[1.0], [0.0], [-1.0], [2.0]], dtype=torch.float64)
    data = scored_batch([[1]] * 4, margin=[0.0] * 4)
    objective = PairObjective()
    whole = float(objective({"scores": scores}, data).loss)
    with batch_counts(BatchCounts(tokens=4.0, sequences=4.0, width=1.0)):
        parts = [
            float(objective({"scores": scores[rows]}, data.select_idxs(rows)).loss)
            for rows in ([0, 1], [2, 3])
        ]
    assert sum(parts) == pytest.approx(whole, rel=1e-12)


def test_a_dummy_row_has_a_loss_with_a_graph() -> None:
    scores = torch.zeros(1, 3, requires_grad=True)
    terms = PairObjective()({"scores": scores}, scored_batch([[0, 0, 0]], margin=[0.0]))
    terms.loss.backward()
    assert float(terms.loss.detach()) == 0.0
    assert scores.grad is not None


def loss_of_verl_0_5(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None
):
    loss = agg_loss(-advantages * log_prob, response_mask, loss_agg_mode)
    return loss, torch.tensor(0.25), torch.tensor(0.5), torch.tensor(0.0)


def loss_with_a_column(log_prob, advantages, response_mask, ref_log_prob):
    assert ref_log_prob.shape == log_prob.shape
    return agg_loss(-advantages * log_prob, response_mask, "token-mean"), {}


loss_with_a_column.needs = ("ref_log_prob",)


@pytest.mark.parametrize("name", ["loss_of_verl_0_5", "loss_with_a_column"])
def test_a_custom_loss_gets_the_columns_that_it_needs(name, outputs):
    config = actor(f"{__name__}:{name}")
    output = PolicyObjective(config, temperature=1.0)(outputs, rows())
    columns = rows().batch
    expected = agg_loss(
        -columns["advantages"] * outputs["log_probs"], columns["response_mask"], "token-mean"
    )
    torch.testing.assert_close(output.loss, expected)
    if name == "loss_of_verl_0_5":
        assert output.means["actor/pg_clipfrac"] == 0.25


def test_a_custom_loss_without_importance_weights_is_refused_in_a_run_with_them(outputs):
    batch = rows()
    batch.batch["rollout_is_weights"] = torch.ones_like(batch.batch["advantages"])
    with pytest.raises(PluginError, match="has no argument rollout_is_weights"):
        PolicyObjective(actor(f"{__name__}:loss_of_verl_0_5"), temperature=1.0)(outputs, batch)
