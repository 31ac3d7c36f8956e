"""Each rejection option against its definition, and its bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hone.algorithms.correction import rejection_mask, rejection_metrics
from hone.config.ranges import REJECTION_OPTIONS

MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1], [1, 0, 0, 0]], dtype=torch.bool)
LOG_RATIO = torch.tensor(
    [[0.5, -0.2, 9.0, 0.1], [0.05, 0.02, -0.01, 0.0], [-1.2, 9.0, 9.0, 9.0]], dtype=torch.float64
)


def statistic(option, values):
    kinds = {
        "k1": lambda x: x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
    }
    level, kind = option.rsplit("_", 1)
    per_token = [kinds[kind](x) for x in values]
    reductions = {"seq_sum": sum, "seq_mean": lambda v: sum(v) / len(v), "seq_max": max}
    return per_token if level == "token" else [reductions[level](per_token)] * len(values)


@pytest.mark.parametrize("option", REJECTION_OPTIONS)
@pytest.mark.parametrize("bound", [1.01, 1.2, 2.0, 3.0])
def test_every_option_equals_its_definition(option, bound):
    if not option.endswith("k1"):
        bound = (bound - 1) / 4  # from below every row's divergence to above most
    keep, results = rejection_mask(LOG_RATIO, MASK, option, bound)
    for i, row in enumerate(MASK):
        positions = row.nonzero()[:, 0].tolist()
        values = statistic(option, [LOG_RATIO[i, t].item() for t in positions])
        for t, value in zip(positions, values, strict=True):
            if option.endswith("k1"):
                expected = -math.log(bound) <= value <= math.log(bound)
            else:
                expected = value <= bound
            assert keep[i, t].item() == expected
    assert not (keep & ~MASK).any()
    assert set(results) == {option}


def test_k1_bounds_the_ratio_train_over_rollout_not_its_inverse():
    log_ratio = torch.tensor([[math.log(3.0), math.log(1 / 3)]])
    keep, _ = rejection_mask(log_ratio, torch.ones(1, 2), "token_k1", "0.2_2.0")
    assert keep.tolist() == [[False, True]]
    keep, _ = rejection_mask(log_ratio, torch.ones(1, 2), "token_k1", "0.5_5.0")
    assert keep.tolist() == [[True, False]]


def test_the_exponent_of_k3_is_bounded():
    _, results = rejection_mask(torch.tensor([[25.0]]).double(), torch.ones(1, 1), "token_k3", 1)
    assert results["token_k3"].values.item() == pytest.approx(math.exp(20) - 1 - 25)


def test_all_options_must_pass_and_one_bound_applies_to_all():
    both, _ = rejection_mask(LOG_RATIO, MASK, "token_k1, seq_max_k2", "1.3,0.1")
    one, _ = rejection_mask(LOG_RATIO, MASK, "token_k1", 1.3)
    other, _ = rejection_mask(LOG_RATIO, MASK, ["seq_max_k2"], [0.1])
    assert torch.equal(both, one & other)
    shared, results = rejection_mask(LOG_RATIO, MASK, ("token_k2", "token_k3"), 0.1)
    assert list(results) == ["token_k2", "token_k3"]
    assert shared.any()


def test_no_option_rejects_nothing():
    keep, results = rejection_mask(LOG_RATIO, MASK, None, None)
    assert torch.equal(keep, MASK)
    assert results == {}


def test_nan_is_rejected():
    keep, _ = rejection_mask(torch.tensor([[math.nan, 0.0]]), torch.ones(1, 2), "token_k1", 2)
    assert keep.tolist() == [[False, True]]


def test_a_bound_is_inclusive():
    log_ratio = torch.tensor([[math.log(2.0), math.log(0.5)]], dtype=torch.float64)
    keep, _ = rejection_mask(log_ratio, torch.ones(1, 2), "token_k1", "0.5_2.0")
    assert keep.all()


@pytest.mark.parametrize(
    ("options", "bound", "message"),
    [
        ("token_k4", 1, "unknown"),
        ("seq_max_k1", 2, "unknown"),
        ("token_k1", None, "needs algorithm.rollout_correction.rollout_rs_threshold"),
        ("token_k1,token_k2,token_k3", "2,3", "has 2 bounds for 3"),
        ("token_k2", "0.1_0.2", "one upper bound"),
        ("token_k1", 0.5, "must be 1 or more"),
        ("token_k1", "2_1", "is not a bound"),
        ("token_k1", "0_1", "is not a bound"),
        ("token_k1", "1_2_3", "is not a bound"),
        ("token_k1", "two", "is not a bound"),
    ],
)
def test_wrong_settings_are_refused(options, bound, message):
    with pytest.raises(ValueError, match=message):
        rejection_mask(LOG_RATIO, MASK, options, bound)


def test_metrics_of_token_and_sequence_options_by_hand():
    options = "token_k1,seq_mean_k2"
    keep, results = rejection_mask(LOG_RATIO, MASK, options, "0.4_1.4,0.06")
    m = rejection_metrics(results, keep, MASK)
    tokens = -LOG_RATIO[MASK].numpy()  # k1 = log(rollout/train)
    name = "rollout_rs_token_k1"
    assert m[f"{name}_mean"] == pytest.approx(tokens.mean())
    assert m[f"{name}_std"] == pytest.approx(tokens.clip(-math.log(1.4), -math.log(0.4)).std())
    assert (m[f"{name}_max"], m[f"{name}_min"]) == (1.2, -0.5)
    assert m[f"{name}_fraction_high"] == pytest.approx(1 / 8)
    assert m[f"{name}_fraction_low"] == pytest.approx(1 / 8)
    assert m[f"{name}_masked_fraction"] == pytest.approx(2 / 8)
    assert m[f"{name}_seq_masked_fraction"] == pytest.approx(2 / 3)
    assert m[f"{name}_seq_min"] == pytest.approx(-0.4 / 3)
    assert m[f"{name}_seq_max_deviation"] == pytest.approx(1.2)
    assert m[f"{name}_seq_fraction_high"] == pytest.approx(1 / 3)  # the ratio e^-1.2 is too small
    assert m[f"{name}_seq_fraction_low"] == 0
    rows = np.array([0.15 / 3, (0.05**2 + 0.02**2 + 0.01**2) / 8, 0.72])
    name = "rollout_rs_seq_mean_k2"
    assert m[f"{name}_seq_mean"] == pytest.approx(rows.mean())
    assert m[f"{name}_seq_fraction_high"] == pytest.approx(1 / 3)
    assert m[f"{name}_masked_fraction"] == pytest.approx(1 / 8)
    assert m[f"{name}_mean"] == pytest.approx((3 * rows[0] + 4 * rows[1] + rows[2]) / 8)
    assert m[f"{name}_fraction_high"] == pytest.approx(1 / 3)  # a share of sequences
    clipped = rows.clip(0, 0.06)
    variance = (3 * clipped[0] ** 2 + 4 * clipped[1] ** 2 + clipped[2] ** 2) / 8
    variance -= ((3 * clipped[0] + 4 * clipped[1] + clipped[2]) / 8) ** 2
    assert m[f"{name}_std"] == pytest.approx(math.sqrt(variance))
    assert m[f"{name}_seq_max_deviation"] == pytest.approx(0.72)
    assert m["rollout_rs_masked_fraction"] == pytest.approx(2 / 8)
    assert m["rollout_rs_seq_masked_fraction"] == pytest.approx(2 / 3)
