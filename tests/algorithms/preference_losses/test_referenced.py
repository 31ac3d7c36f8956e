"""DPO and its variants: values computed by hand from the papers' formulas, in float64."""

from __future__ import annotations

from math import exp, log

import pytest

from .two_pairs import PAIRS, call, losses_of

# The log-ratios differ by 2 − (−1) = 3 and 0 − 1 = −1; with β = 0.5, the logits are 1.5 and −0.5.


def softplus(x: float) -> float:
    return log(1 + exp(x))


def sigma(x: float) -> float:
    return 1 / (1 + exp(-x))


def test_sigmoid_is_the_log_loss_of_the_reward_difference() -> None:
    assert losses_of("sigmoid") == pytest.approx([softplus(-1.5), softplus(0.5)], rel=1e-12)
    assert losses_of("sigmoid")[0] == pytest.approx(0.20141327798275246, rel=1e-12)


def test_a_margin_is_subtracted_from_the_logit() -> None:
    margins = {"margin": (0.25, 2.0)}
    expected = [softplus(-1.25), softplus(2.5)]
    assert losses_of("sigmoid", margins) == pytest.approx(expected, rel=1e-12)
    assert losses_of("robust", margins) == pytest.approx(expected, rel=1e-12)
    assert losses_of("hinge", margins) == pytest.approx([0.0, 3.5])


def test_sigmoid_norm_divides_log_ratios_by_the_lengths() -> None:
    # 2/4 − (−1/2) = 1 and 0/1 − 1/5 = −0.2
    expected = [softplus(-0.5), softplus(0.1)]
    assert losses_of("sigmoid_norm") == pytest.approx(expected, rel=1e-12)


def test_ipo_squares_the_distance_of_the_normalised_difference_to_its_target() -> None:
    # 1 / (2 · 0.5) = 1: (1 − 1)² and (−0.2 − 1)²
    assert losses_of("ipo") == pytest.approx([0.0, 1.44], abs=1e-12)


def test_hinge_is_zero_beyond_the_margin_of_one() -> None:
    assert losses_of("hinge") == pytest.approx([0.0, 1.5])


def test_robust_weighs_the_swapped_pair_negatively() -> None:
    expected = [
        (0.9 * softplus(-1.5) - 0.1 * softplus(1.5)) / 0.8,
        (0.9 * softplus(0.5) - 0.1 * softplus(-0.5)) / 0.8,
    ]
    assert losses_of("robust", label_smoothing=0.1) == pytest.approx(expected, rel=1e-12)


def test_robust_is_unbiased_when_the_share_of_swapped_pairs_is_known() -> None:
    swapped = {
        "chosen_logp": PAIRS["rejected_logp"],
        "rejected_logp": PAIRS["chosen_logp"],
        "ref_chosen_logp": PAIRS["ref_rejected_logp"],
        "ref_rejected_logp": PAIRS["ref_chosen_logp"],
    }
    straight = losses_of("robust", label_smoothing=0.2)
    flipped = losses_of("robust", swapped, label_smoothing=0.2)
    mean = [0.8 * a + 0.2 * b for a, b in zip(straight, flipped, strict=True)]
    assert mean == pytest.approx(losses_of("sigmoid"), rel=1e-12)


def test_apo_zero_raises_the_chosen_and_lowers_the_rejected() -> None:
    expected = [(1 - sigma(1.0)) + sigma(-0.5), (1 - sigma(0.0)) + sigma(0.5)]
    assert losses_of("apo_zero") == pytest.approx(expected, rel=1e-12)


def test_apo_down_lowers_the_chosen_and_the_rejected_further() -> None:
    expected = [sigma(1.0) + (1 - sigma(1.5)), sigma(0.0) + (1 - sigma(-0.5))]
    assert losses_of("apo_down") == pytest.approx(expected, rel=1e-12)


def test_rewards_are_beta_times_the_log_ratios() -> None:
    for name in ("sigmoid", "hinge", "robust", "apo_zero", "apo_down"):
        _, metrics = call(name, PAIRS)
        assert metrics["rewards/chosen"] == pytest.approx([1.0, 0.0])
        assert metrics["rewards/rejected"] == pytest.approx([-0.5, 0.5])
    for name in ("sigmoid_norm", "ipo"):
        _, metrics = call(name, PAIRS)
        assert metrics["rewards/chosen"] == pytest.approx([0.25, 0.0])
        assert metrics["rewards/rejected"] == pytest.approx([-0.25, 0.1])
