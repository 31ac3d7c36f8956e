"""Properties of every loss, by hand: weights, gradients, keywords, aggregation."""

from __future__ import annotations

import math

import pytest
import torch

from hone.algorithms.policy_losses import get_policy_loss_fn
from hone.algorithms.policy_losses.policy_loss import Tokens, log_prob_gap_metrics
from hone.verl.dialect import load_config
from tests.algorithms.policy_losses.one_token import CFG, one


def test_importance_weights_multiply_and_get_no_gradient():
    weights = torch.tensor([[0.5]], dtype=torch.float64, requires_grad=True)
    loss, gradient, _ = one("gpg", 1.0, 2.0, rollout_is_weights=weights)
    assert gradient == pytest.approx(-1)
    assert loss == pytest.approx(-2 * math.log(0.5) * 0.5)
    assert weights.grad is None


def test_advantages_and_old_log_probs_get_no_gradient():
    old, adv = (torch.zeros(1, 2, requires_grad=True) for _ in range(2))
    new = torch.zeros(1, 2, requires_grad=True)
    get_policy_loss_fn("vanilla")(old, new, adv, torch.ones(1, 2), config=CFG)[0].backward()
    assert old.grad is None
    assert adv.grad is None


def test_the_reported_kl_is_of_the_bounded_log_ratio_where_the_loss_bounds_it():
    old = torch.tensor([[-50.0, -1.0]], dtype=torch.float64)
    new = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    for name, bounded in (("vanilla", True), ("cispo", True), ("dppo_tv", True), ("gspo", False)):
        _, metrics = get_policy_loss_fn(name)(
            old, new, torch.ones(1, 2), torch.ones(1, 2), config=CFG
        )
        assert metrics["actor/ppo_kl"].item() == pytest.approx(((-20 if bounded else -49) + 1) / 2)


def test_an_unknown_keyword_is_refused_with_the_nearest_known_one():
    args = (torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2))
    with pytest.raises(TypeError, match="Did you mean 'loss_agg_mode'"):
        get_policy_loss_fn("vanilla")(*args, loss_agg="token-sum", config=CFG)
    with pytest.raises(TypeError, match="takes no argument 'rollout_correction'"):
        get_policy_loss_fn("vanilla")(*args, config=CFG, rollout_correction={})


def test_a_call_without_a_mode_aggregates_as_the_loss_is_defined():
    old = torch.zeros(2, 2, dtype=torch.float64)
    new = torch.tensor([[0.1, 0.2], [0.3, 0.0]], dtype=torch.float64)
    adv, mask = torch.ones(2, 2), torch.tensor([[1, 1], [1, 0]])
    for name, mode in (
        ("vanilla", "token-mean"), ("gspo", "seq-mean-token-mean"),
        ("reinforce", "seq-mean-token-sum"),
    ):  # fmt: skip
        bare, _ = get_policy_loss_fn(name)(old, new, adv, mask, config=CFG)
        named, _ = get_policy_loss_fn(name)(old, new, adv, mask, mode, CFG)
        assert bare == named


def test_loss_scale_factor_of_the_config_reaches_the_aggregation():
    cfg = {**CFG, "loss_scale_factor": 10.0}
    args = (torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2))
    loss, _ = get_policy_loss_fn("vanilla")(*args, "seq-mean-token-sum-norm", cfg)
    assert loss.item() == pytest.approx(-0.2)


@pytest.mark.parametrize(
    ("overrides", "bounds"),
    [
        ([], (0.2, 0.2)),
        (["clip_ratio=0.3"], (0.3, 0.3)),
        (["clip_ratio_high=0.28"], (0.2, 0.28)),
        (["clip_ratio_low=0.1"], (0.1, 0.2)),
    ],
)
def test_clip_ratio_works_alone_and_under_low_and_high(overrides, bounds):
    config = load_config([f"actor_rollout_ref.actor.{o}" for o in overrides])
    zeros = torch.zeros(1, 1)
    tokens = Tokens(zeros, zeros, zeros, zeros.bool(), config.actor_rollout_ref.actor)
    assert tokens.clip_bounds() == bounds


def test_the_gap_of_trainer_and_rollout_by_hand():
    mask = torch.tensor([[1, 1, 0]])
    trainer, rollout = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -1.0, -1.0]])
    metrics = log_prob_gap_metrics(trainer, rollout, mask)
    k3 = [math.exp(0.5) - 0.5 - 1, math.exp(-1.0) + 1.0 - 1]
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(
        {
            "kl": 0.25,
            "k3_kl": sum(k3) / 2,
            "log_prob_abs_diff_mean": 0.75,
            "log_prob_abs_diff_max": 1.0,
        }
    )
    empty = log_prob_gap_metrics(trainer[:0], rollout[:0], mask[:0])
    assert {value.item() for value in empty.values()} == {0}
