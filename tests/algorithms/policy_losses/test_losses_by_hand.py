"""Single tokens by hand, the metrics, and what each loss refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hone.algorithms.policy_losses import get_policy_loss_fn
from hone.algorithms.policy_losses.policy_loss import Tokens
from hone.config import load_config

CFG = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, "tau_pos": 1.0, "tau_neg": 1.05}


def one(name, ratio, advantage, old=0.5, cfg=CFG, **kw):
    """Loss, gradient and metrics of a single token whose probability went from old to old·ratio."""
    new = torch.tensor([[math.log(old * ratio)]], dtype=torch.float64, requires_grad=True)
    old_log_prob = torch.tensor([[math.log(old)]], dtype=torch.float64)
    advantages = torch.tensor([[advantage]], dtype=torch.float64)
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob, new, advantages, torch.ones(1, 1), config=cfg, **kw
    )
    loss.backward()
    return (
        loss.item(),
        new.grad.item(),
        {k.removeprefix("actor/"): v.item() for k, v in metrics.items()},
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "lower"),
    [
        (1.1, 2.0, -2.2, 0, 0),  # inside
        (1.5, 2.0, -2.4, 1, 0),  # rose far enough
        (0.5, 2.0, -1.0, 0, 0),  # fell although good: no clip
        (1.5, -2.0, 3.0, 0, 0),  # rose although bad: no clip
        (0.5, -2.0, 1.6, 1, 0),  # fell far enough
        (5.0, -2.0, 6.0, 0, 1),  # dual clip
    ],
)
def test_vanilla_clips_on_the_side_the_advantage_pushes_to(ratio, advantage, loss, clipped, lower):
    value, gradient, metrics = one("vanilla", ratio, advantage)
    assert value == pytest.approx(loss)
    assert metrics["pg_clipfrac"] == clipped
    assert metrics["pg_clipfrac_lower"] == lower
    assert gradient == pytest.approx(0 if clipped or lower else -advantage * ratio)


def test_clip_ratio_alone_moves_both_bounds():
    for ratio, advantage, bound in ((2.0, 1.0, 1.4), (0.1, -1.0, 0.6)):
        value, _, _ = one("vanilla", ratio, advantage, cfg={"clip_ratio": 0.4, "clip_ratio_c": 3.0})
        assert value == pytest.approx(-advantage * bound)


def test_low_and_high_win_over_clip_ratio_each_for_itself():
    cfg = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, "clip_ratio_high": 0.28, "clip_ratio_low": None}
    assert one("vanilla", 2.0, 1.0, cfg=cfg)[0] == pytest.approx(-1.28)
    assert one("vanilla", 0.1, -1.0, cfg=cfg)[0] == pytest.approx(0.8)
    cfg = {"clip_ratio": 0.2, "clip_ratio_c": 3.0, "clip_ratio_low": 0.1}
    assert one("vanilla", 2.0, 1.0, cfg=cfg)[0] == pytest.approx(-1.2)
    assert one("vanilla", 0.1, -1.0, cfg=cfg)[0] == pytest.approx(0.9)


def test_config_may_be_an_object():
    from types import SimpleNamespace

    cfg = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=None, clip_ratio_high=0.3, clip_ratio_c=3.0
    )
    assert one("vanilla", 2.0, 1.0, cfg=cfg)[0] == pytest.approx(-1.3)


def test_a_dual_clip_of_one_or_less_is_refused():
    with pytest.raises(ValueError, match="clip_ratio_c=1"):
        one("vanilla", 1.0, 1.0, cfg={"clip_ratio": 0.2, "clip_ratio_c": 1.0})


@pytest.mark.parametrize("name", ["vanilla", "cispo", "sapo", "dppo_tv"])
def test_a_huge_ratio_stays_finite(name):
    old = torch.full((1, 1), -900.0)
    for new, advantage in ((-1.0, 1.0), (-1.0, -1.0)):
        new_log_prob = torch.tensor([[new]], requires_grad=True)
        loss, _ = get_policy_loss_fn(name)(
            old, new_log_prob, torch.tensor([[advantage]]), torch.ones(1, 1), config=CFG
        )
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(new_log_prob.grad).all()


def test_the_exponent_of_the_ratio_is_bounded_at_twenty():
    old, new = torch.full((1, 1), -25.0).double(), torch.zeros(1, 1).double()
    loss, _ = get_policy_loss_fn("vanilla")(
        old, new, -torch.ones(1, 1), torch.ones(1, 1), config={**CFG, "clip_ratio_c": 1e12}
    )
    assert loss.item() == pytest.approx(math.exp(20))


def test_gspo_caps_the_exponent_of_the_sequence_ratio():
    old = torch.full((1, 2), -50.0, dtype=torch.float64)
    new = torch.full((1, 2), -1.0, dtype=torch.float64)
    loss, _ = get_policy_loss_fn("gspo")(old, new, -torch.ones(1, 2), torch.ones(1, 2), config=CFG)
    assert loss.item() == pytest.approx(math.exp(10))


def test_gspo_clips_the_whole_sequence_by_its_geometric_mean_ratio():
    old = torch.zeros(1, 2, dtype=torch.float64)
    new = torch.tensor([[math.log(2.0), math.log(0.5)]], requires_grad=True, dtype=torch.float64)
    loss, metrics = get_policy_loss_fn("gspo")(
        old, new, torch.ones(1, 2), torch.ones(1, 2), config=CFG
    )
    loss.backward()
    assert loss.item() == pytest.approx(-1)  # the two ratios cancel: nothing to clip
    np.testing.assert_allclose(new.grad, [[-0.5, -0.5]])
    assert metrics["actor/pg_clipfrac"] == 0
    doubled = torch.full((1, 2), math.log(2.0))
    for sign, clipped in ((1, 1), (-1, 0)):
        _, metrics = get_policy_loss_fn("gspo")(
            old, doubled, sign * torch.ones(1, 2), torch.ones(1, 2), config=CFG
        )
        assert metrics["actor/pg_clipfrac"] == clipped


def test_luspo_is_gspo_times_the_length():
    random = torch.Generator().manual_seed(0)
    old, new, adv = (torch.randn(4, 5, generator=random, dtype=torch.float64) for _ in range(3))
    mask = torch.arange(5) < torch.tensor([[1], [2], [5], [3]])
    adv = adv[:, :1].expand(4, 5)
    rows = [
        get_policy_loss_fn("gspo")(
            old[i : i + 1], new[i : i + 1], adv[i : i + 1], mask[i : i + 1],
            "seq-mean-token-mean", CFG,
        )[0] * mask[i].sum()
        for i in range(4)
    ]  # fmt: skip
    loss, _ = get_policy_loss_fn("luspo")(old, new, adv, mask, "token-mean", CFG)
    assert loss.item() == pytest.approx(float(sum(rows)) / 4)


def test_geo_mean_clips_in_log_space_and_averages_over_sequences():
    old = torch.zeros(2, 2, dtype=torch.float64)
    new = torch.tensor([[1.0, -1.0], [0.1, 0.1]], dtype=torch.float64)
    adv = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    loss, metrics = get_policy_loss_fn("geo_mean")(old, new, adv, torch.ones(2, 2), config=CFG)
    expected = (-math.exp((0.2 - 1) / 2) + math.exp(0.1)) / 2
    assert loss.item() == pytest.approx(expected)
    assert metrics["actor/pg_clipfrac"].item() == 0.5  # both tokens of the first row
    assert metrics["actor/pg_clipfrac_lower"].item() == 0


def test_geo_mean_counts_tokens_clipped_from_above():
    old, adv = torch.zeros(1, 3), torch.ones(1, 3)
    new = torch.tensor([[1.0, 0.9, 0.1]])
    _, metrics = get_policy_loss_fn("geo_mean")(old, new, adv, torch.ones(1, 3), config=CFG)
    assert metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 3)
    assert metrics["actor/pg_clipfrac_lower"].item() == 0


def test_geo_mean_counts_tokens_of_negative_advantage_apart():
    old, adv = torch.zeros(1, 4, dtype=torch.float64), -torch.ones(1, 4, dtype=torch.float64)
    new = torch.tensor([[-1.0, 1.0, 0.1, -0.1]], dtype=torch.float64)
    _, metrics = get_policy_loss_fn("geo_mean")(old, new, adv, torch.ones(1, 4), config=CFG)
    assert metrics["actor/pg_clipfrac"].item() == 0
    assert metrics["actor/pg_clipfrac_lower"].item() == 0.5


def test_sapo_at_ratio_one_weighs_tokens_by_two_over_tau():
    assert one("sapo", 1.0, 3.0)[0] == pytest.approx(-6)
    assert one("sapo", 1.0, -3.0)[0] == pytest.approx(6 / 1.05)
    assert one("sapo", 1.0, 3.0)[1] == pytest.approx(-3)  # the policy gradient
    for key in ("tau_pos", "tau_neg"):
        with pytest.raises(ValueError, match=key):
            one("sapo", 1.0, 1.0, cfg={**CFG, key: 0.0})


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    loss, gradient, metrics = one("cispo", 1.5, 2.0)
    assert loss == pytest.approx(-1.2 * 2 * math.log(0.75))
    assert gradient == pytest.approx(-1.2 * 2)
    assert (metrics["pg_clipfrac"], metrics["pg_clipfrac_lower"]) == (1, 0)
    assert one("cispo", 0.5, 2.0)[1] == pytest.approx(-0.8 * 2)
    below = one("cispo", 0.5, 2.0)[2]
    assert (below["pg_clipfrac"], below["pg_clipfrac_lower"]) == (1, 0)
    inside = one("cispo", 1.0, 2.0)[2]
    assert (inside["pg_clipfrac"], inside["pg_clipfrac_lower"]) == (0, 0)


def test_dppo_tv_judges_the_probability_not_the_ratio():
    rare = one("dppo_tv", 10.0, 1.0, old=1e-3)  # 0.001 → 0.01: nothing moved
    assert rare[1] == pytest.approx(-3)  # the weight is cut at clip_ratio_c
    far = one("dppo_tv", 1.8, 1.0, old=0.5)  # 0.5 → 0.9
    assert far[:2] == (0, 0)
    assert far[2]["pg_clipfrac"] == 1
    down = one("dppo_tv", 0.2, -1.0, old=0.5)  # 0.5 → 0.1
    assert down[1] == 0
    assert (down[2]["pg_clipfrac"], down[2]["pg_clipfrac_lower"]) == (1, 0)
    assert (rare[2]["pg_clipfrac"], rare[2]["pg_clipfrac_lower"]) == (0, 1)  # kept, cut at c
    assert far[2]["pg_clipfrac_lower"] == 0
    assert one("dppo_tv", 0.2, 1.0, old=0.5)[1] == pytest.approx(-0.2)  # moving back is kept
    for advantage in (1.0, -1.0):
        kept = one("dppo_tv", 1.0, advantage)[2]
        assert (kept["pg_clipfrac"], kept["pg_clipfrac_lower"]) == (0, 0)


def test_dppo_kl_keeps_what_moves_back_however_far():
    assert one("dppo_kl", 1.9, 1.0, old=0.5)[1] == 0
    assert one("dppo_kl", 0.02, 1.0, old=0.5)[1] == pytest.approx(-0.02)
    assert one("dppo_kl", 0.02, -1.0, old=0.5)[1] == 0
    assert one("dppo_kl", 1.9, -1.0, old=0.5)[1] == pytest.approx(1.9)
    assert one("dppo_kl", 1.1, 1.0, old=0.5)[1] == pytest.approx(-1.1)


def test_dppo_kl_is_defined_for_certain_tokens():
    loss, gradient, _ = one("dppo_kl", 1.0, 1.0, old=1.0)
    assert (loss, gradient) == (0, -1)
    cfg = {**CFG, "clip_ratio": 10.0}  # 0.2 → 1: 0.2·log 0.2 + 0.8·log(0.8/1e-8) = 14.2
    assert one("dppo_kl", 5.0, 1.0, old=0.2, cfg=cfg)[1] == 0
    assert one("dppo_kl", 5.0, 1.0, old=0.2, cfg={**CFG, "clip_ratio": 14.5})[1] == pytest.approx(
        -3
    )


def test_dro_pulls_towards_the_old_policy_and_needs_its_weight():
    cfg = {**CFG, "policy_loss": {"dro_beta": 0.5}}
    loss, gradient, _ = one("dro", math.e, 2.0, cfg=cfg)
    assert loss == pytest.approx(-(2 * math.log(0.5 * math.e) - 0.25))
    assert gradient == pytest.approx(-(2 - 0.5))
    for beta in (None, 0.0, -1.0):
        with pytest.raises(ValueError, match="dro_beta"):
            one("dro", 1.0, 1.0, cfg={**CFG, "policy_loss": {"dro_beta": beta}})


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
