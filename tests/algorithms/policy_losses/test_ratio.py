"""Losses over token ratios, by hand."""

from __future__ import annotations

import math

import pytest

from tests.algorithms.policy_losses.one_token import CFG, one


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


def test_dppo_tv_bounds_the_probability_not_the_ratio():
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
