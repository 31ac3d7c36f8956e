"""Metrics of rollout correction, by hand and against a slow reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hone.algorithms.correction import correct

from .two_rows import MASK, OLD, ROLLOUT, options


def test_agreement_metrics_by_hand():
    _, _, m = correct(OLD, ROLLOUT, MASK, options())
    m = {key.removeprefix("rollout_corr/"): value for key, value in m.items()}
    d = [math.log(0.5), math.log(4), 0, 0, 0]
    assert m["k3_kl"] == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 5)
    row = [1 - (d[0] + d[1]) / 2, 1.0]  # training log-perplexity of each row; rollout's is 1
    assert m["training_log_ppl"] == pytest.approx(sum(row) / 2)
    assert m["training_ppl"] == pytest.approx(sum(map(math.exp, row)) / 2)
    assert m["rollout_log_ppl"] == pytest.approx(1)
    assert m["rollout_ppl"] == pytest.approx(math.e)
    assert m["log_ppl_diff"] == pytest.approx((row[0] - 1) / 2)
    assert m["log_ppl_abs_diff"] == pytest.approx((1 - row[0]) / 2)
    assert m["log_ppl_diff_max"] == pytest.approx(0)
    assert m["log_ppl_diff_min"] == pytest.approx(row[0] - 1)
    assert m["ppl_ratio"] == pytest.approx((math.exp(row[0] - 1) + 1) / 2)
    assert m["chi2_token"] == pytest.approx((0.25 + 16 + 3) / 5 - 1)
    assert m["chi2_seq"] == pytest.approx((4 + 1) / 2 - 1)


def test_weight_metrics_by_hand():
    _, _, m = correct(OLD, ROLLOUT, MASK, options(rollout_is="token", rollout_is_threshold=2.5))
    m = {key.removeprefix("rollout_corr/rollout_is_"): value for key, value in m.items()}
    truncated = np.array([0.5, 2.5, 1, 1, 1])
    assert m["mean"] == pytest.approx(truncated.mean())
    assert m["max"] == pytest.approx(2.5)
    assert m["min"] == pytest.approx(0.5)
    assert m["std"] == pytest.approx(truncated.std())
    assert m["eff_sample_size"] == pytest.approx(1 / np.mean((truncated / truncated.mean()) ** 2))
    assert m["ratio_fraction_high"] == pytest.approx(0.2)
    assert m["ratio_fraction_low"] == 0
    assert m["seq_mean"] == pytest.approx((1.5 + 1) / 2)
    assert m["seq_max"] == pytest.approx(1.5)
    assert m["seq_min"] == 1
    assert m["seq_std"] == pytest.approx(np.std([1.5, 1], ddof=1))
    assert m["seq_max_deviation"] == pytest.approx(0.5)
    assert m["seq_fraction_high"] == 0  # the mean ratio 2.25 before truncation is inside
    assert m["seq_fraction_low"] == 0
    assert "oob_ratio" not in m
    _, _, low = correct(-OLD - 2, ROLLOUT, MASK, options(rollout_is="token"))
    assert low["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(0.2)


def test_sequence_weights_report_the_ratio_before_truncation_as_extremes():
    _, _, m = correct(OLD, ROLLOUT, MASK, options(rollout_is="sequence", rollout_is_threshold=1.5))
    m = {key.removeprefix("rollout_corr/rollout_is_"): value for key, value in m.items()}
    assert m["mean"] == pytest.approx((2 * 1.5 + 3) / 5)
    assert (m["max"], m["min"]) == (pytest.approx(2), pytest.approx(1))
    assert m["ratio_fraction_high"] == 0.5  # a share of sequences, not of tokens
    assert m["seq_fraction_high"] == 0.5
    assert m["seq_max"] == 1.5


def test_icepop_reports_the_share_of_tokens_outside_the_band():
    _, _, m = correct(
        OLD, ROLLOUT, MASK, options(rollout_is="token", rollout_is_threshold="0.6_5.0")
    )
    assert m["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(0.2)
    assert m["rollout_corr/rollout_is_min"] == 0  # the weight that was set to 0
    assert m["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(0.2)
    _, _, m = correct(
        OLD, ROLLOUT, MASK, options(rollout_is="sequence", rollout_is_threshold="0.5_1.9")
    )
    assert m["rollout_corr/rollout_is_oob_ratio"] == pytest.approx(2 / 5)


def slow_weight_metrics(ratios, level, bounds):
    """Computes the metrics with plain loops; `ratios` has the train/rollout ratios of each row."""
    low, high = (1 / bounds[0], bounds[0]) if len(bounds) == 1 else bounds

    def applied(ratio):
        if len(bounds) == 1:
            return min(ratio, high)
        return ratio if low <= ratio <= high else 0.0

    rows = [row for row in ratios if row]
    if level == "sequence":
        rows = [[math.prod(row)] * len(row) for row in rows]
    weights = [[applied(r) for r in row] for row in rows]
    tokens = [w for row in weights for w in row]
    raw = [r for row in rows for r in row] if level == "token" else [row[0] for row in rows]
    means = [sum(row) / len(row) for row in weights]
    raw_means = [sum(row) / len(row) for row in rows]
    mean = sum(tokens) / len(tokens)
    extremes = tokens if level == "token" else raw
    result = {
        "mean": mean,
        "std": math.sqrt(sum((w - mean) ** 2 for w in tokens) / len(tokens)),
        "max": max(extremes),
        "min": min(extremes),
        "eff_sample_size": mean**2 * len(tokens) / (sum(w * w for w in tokens) or 1.0),
        "ratio_fraction_high": sum(r > high for r in raw) / len(raw),
        "ratio_fraction_low": sum(r < low for r in raw) / len(raw),
        "seq_mean": sum(means) / len(means),
        "seq_std": float(np.std(means, ddof=1)),
        "seq_max": max(means),
        "seq_min": min(means),
        "seq_max_deviation": max(abs(w - 1) for w in means),
        "seq_fraction_high": sum(r > high for r in raw_means) / len(rows),
        "seq_fraction_low": sum(r < low for r in raw_means) / len(rows),
    }
    if len(bounds) == 2:
        all_ratios = [r for row in rows for r in row]
        result["oob_ratio"] = sum(not low <= r <= high for r in all_ratios) / len(all_ratios)
    return result


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("threshold", [2.0, 1.1, "0.8_1.5", "0.3_4"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_weight_metrics_equal_the_slow_reference(level, threshold, seed):
    random = np.random.default_rng(seed)
    difference = random.normal(0, 0.4, (6, 5))
    mask = random.uniform(size=(6, 5)) < 0.7
    mask[2] = False  # a row without policy tokens does not count
    mask[0, 0] = mask[1, 0] = True
    rollout = torch.full((6, 5), -1.0, dtype=torch.float64)
    _, _, actual = correct(
        rollout + torch.from_numpy(difference), rollout, torch.from_numpy(mask),
        options(rollout_is=level, rollout_is_threshold=threshold),
    )  # fmt: skip
    ratios = [np.exp(row[values]).tolist() for row, values in zip(difference, mask, strict=True)]
    bounds = tuple(float(part) for part in str(threshold).split("_"))
    expected = slow_weight_metrics(ratios, level, bounds)
    name = "rollout_corr/rollout_is_"
    actual = {
        key.removeprefix(name): value for key, value in actual.items() if key.startswith(name)
    }
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_an_empty_mask_has_finite_metrics():
    actual, mask, metrics = correct(
        OLD, ROLLOUT, torch.zeros_like(MASK), options(rollout_is="token", rollout_rs="token_k2",
                                                      rollout_rs_threshold=1)
    )  # fmt: skip
    assert (actual == 0).all()
    assert (mask == 0).all()
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0
    assert all(math.isfinite(value) for value in metrics.values())
