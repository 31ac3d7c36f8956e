"""Metrics by verl's functions, against hand-computed numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hone.protocol import DataProto
from hone.verl.metric_utils import (
    AggregationType,
    Metric,
    bootstrap_metric,
    calc_maj_val,
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    compute_variance_proxy_metrics,
    reduce_metrics,
)

TWO = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def batch() -> DataProto:
    names = ("token_level_scores", "token_level_rewards", "advantages", "returns", "values")
    columns = dict.fromkeys(names, TWO)
    mask = torch.ones(2, 5, dtype=torch.long)
    full = {"responses": mask[:, :2], "attention_mask": mask, "response_mask": mask[:, :2]}
    return DataProto.from_dict({**columns, **full}, meta_info={"global_token_num": [5, 5]})


def test_lists_become_numbers_by_their_names() -> None:
    metrics = {
        "a/max": [1.0, 3.0],
        "a/min": [1, 3],
        "a/loss": [np.float32(1), 3.0],
        "b": Metric("sum", [1.0, 2.0]),
    }
    assert reduce_metrics(metrics) == {"a/max": 3.0, "a/min": 1.0, "a/loss": 2.0, "b": 3.0}
    assert math.isnan(reduce_metrics({"none": []})["none"])


def test_a_metric_knows_how_its_values_join() -> None:
    one = Metric("mean", torch.tensor(1.0))
    one.append(Metric(AggregationType.MEAN, [2, 3.0]))
    assert (one.values, one.aggregate()) == ([1.0, 2, 3.0], 2.0)
    with pytest.raises(ValueError, match="cannot join"):
        one.extend(Metric("sum"))
    with pytest.raises(ValueError, match="one number at a time"):
        one.append(torch.zeros(2))
    ranks = [Metric("sum", [1.0, 2.0]), Metric("sum", [3.0, 4.0])]
    assert Metric.aggregate_dp(ranks) == 5.0
    assert Metric.aggregate_dp([Metric("max", [1.0]), Metric("max", [3.0])]) == 3.0
    assert Metric.from_dict({"a": 1.0}, "min")["a"].init_list().aggregation is AggregationType.MIN


def test_scores_are_sums_and_the_critic_has_its_own_lines() -> None:
    metrics = compute_data_metrics(batch())
    assert metrics["critic/score/mean"] == 5.0
    assert metrics["critic/values/mean"] == 2.5
    assert (metrics["prompt_length/mean"], metrics["response_length/mean"]) == (3.0, 2.0)
    without = compute_data_metrics(batch(), use_critic=False)
    assert metrics.keys() - without.keys() == {
        "critic/values/mean",
        "critic/values/max",
        "critic/values/min",
        "critic/vf_explained_var",
    }


def test_seconds_per_token_count_what_a_phase_works_on() -> None:
    metrics = compute_timing_metrics(batch(), {"gen": 1.0, "ref": 1.0, "step": 3.0})
    assert metrics["timing_s/step"] == 3.0
    assert metrics["timing_per_token_ms/gen"] == 1000 / 4
    assert metrics["timing_per_token_ms/ref"] == 1000 / 10
    assert "timing_per_token_ms/step" not in metrics
    assert compute_throughout_metrics(batch(), {"step": 2.0}, 5)["perf/throughput"] == 1.0


def test_a_bootstrap_and_a_vote() -> None:
    (mean, spread), (best, _) = bootstrap_metric([1, 2, 3], 3, [np.mean, np.max], 500)
    assert mean == pytest.approx(2.0, abs=0.1)
    assert spread == pytest.approx(math.sqrt(2 / 3 / 3), abs=0.05)
    assert best == pytest.approx((1 + 2 * 7 + 3 * 19) / 27, abs=0.1)
    with pytest.raises(ValueError):
        bootstrap_metric([], 1, [np.mean])
    votes = [{"pred": p, "val": v} for p, v in (("B", 0.1), ("A", 0.2), ("A", 0.3))]
    assert calc_maj_val(votes, "pred", "val") == 0.2


def test_signal_and_noise_of_the_gradient_are_estimated() -> None:
    columns = {
        "old_log_probs": torch.tensor([[0.5, 0.25], [0.5, 0.5]]).log(),
        "sum_pi_squared": torch.tensor([[0.5, 0.5], [0.5, 0.5]]),
        "advantages": torch.tensor([[2.0, 4.0], [1.0, 9.0]]),
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    # score norms: 0.5 + 1.0 and 0.5; squared mean advantages: 9 and 1
    metrics = compute_variance_proxy_metrics(DataProto.from_dict(columns), gradient_norm=2.0)
    assert metrics == pytest.approx(
        {
            "variance_proxy/proxy1_signal_strength": 4.0,
            "variance_proxy/proxy2_total_power": (9 * 1.5 + 0.5) / 2,
            "variance_proxy/proxy3_pure_noise": 3.0,
            "variance_proxy/expected_a_squared": 5.0,
            "variance_proxy/expected_w": 1.0,
        }
    )
    weights = {"rollout_is_weights": torch.tensor([[2.0, 0.0], [2.0, 0.0]])}
    weighted = compute_variance_proxy_metrics(DataProto.from_dict({**columns, **weights}))
    assert weighted["variance_proxy/proxy2_total_power"] == pytest.approx((9 * 0.5 + 4 * 0.5) / 2)
    assert weighted["variance_proxy/expected_w"] == pytest.approx(2.0)
    assert weighted["variance_proxy/proxy3_pure_noise"] == 0.0
    del columns["sum_pi_squared"]
    assert compute_variance_proxy_metrics(DataProto.from_dict(columns)) == {}
