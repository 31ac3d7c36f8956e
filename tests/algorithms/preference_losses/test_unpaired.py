"""KTO and the unpaired APO: values computed by hand from the papers' formulas, in float64."""

from __future__ import annotations

from math import exp

import pytest

from hone.algorithms.preference_losses import LossFunction

from .two_pairs import call

ROWS = {
    "logp": (-4.0, -6.0, -5.0),
    "ref_logp": (-6.0, -5.0, -5.0),
    "label": (1.0, 0.0, 0.0),
    "kl": 0.4,
}


def sigma(x: float) -> float:
    return 1 / (1 + exp(-x))


def test_kto_is_the_weighted_distance_of_the_value_from_one() -> None:
    losses, metrics = call("kto", ROWS, desirable_weight=2.0, undesirable_weight=3.0)
    # log-ratios 2, −1 and 0; β = 0.5
    expected = [2 * (1 - sigma(0.8)), 3 * (1 - sigma(0.7)), 3 * (1 - sigma(0.2))]
    assert losses == pytest.approx(expected, rel=1e-12)
    assert metrics["rewards"] == pytest.approx([1.0, -0.5, 0.0])


def test_apo_zero_unpaired_is_kto_without_kl() -> None:
    losses, _ = call("apo_zero_unpaired", ROWS)
    assert losses == pytest.approx([1 - sigma(1.0), sigma(-0.5), 0.5], rel=1e-12)
    assert losses == call("kto", ROWS | {"kl": 0.0})[0]
    assert LossFunction("kto").needs_kl
    assert not LossFunction("apo_zero_unpaired").needs_kl


def test_both_compare_single_responses_with_the_reference() -> None:
    for name in ("kto", "apo_zero_unpaired"):
        loss = LossFunction(name)
        assert loss.needs_reference
        assert not loss.is_paired
