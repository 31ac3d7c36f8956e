from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.tracking.curve import bucket_means, envelope, smooth

FINITE = st.floats(-1e6, 1e6)


@given(st.lists(FINITE), st.floats(0, 0.99))
def test_each_point_is_the_weighted_mean_of_those_before(values: list[float], w: float) -> None:
    smoothed = smooth(values, w)
    for i, value in enumerate(smoothed):
        weights = [w ** (i - j) for j in range(i + 1)]
        expected = math.fsum(a * b for a, b in zip(weights, values, strict=False)) / math.fsum(
            weights
        )
        assert value == pytest.approx(expected, rel=1e-9, abs=1e-3)


def test_weight_zero_changes_nothing_and_a_constant_stays() -> None:
    assert smooth([3.0, 1.0, 2.0], 0) == [3.0, 1.0, 2.0]
    assert smooth([5.0] * 4, 0.9) == pytest.approx([5.0] * 4)


def test_non_finite_values_do_not_affect_others() -> None:
    smoothed = smooth([1.0, math.nan, 1.0], 0.5)
    assert math.isnan(smoothed[1])
    assert smoothed[2] == pytest.approx(1.0)


@pytest.mark.parametrize("weight", [-0.1, 1.0])
def test_a_weight_outside_its_range_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight must be in"):
        smooth([1.0], weight)


@given(st.lists(FINITE, min_size=51, max_size=400), st.integers(1, 50))
def test_an_envelope_keeps_ends_and_extremes(values: list[float], buckets: int) -> None:
    steps, points = envelope(range(len(values)), values, buckets)
    assert len(points) <= 2 * buckets + 2
    assert steps == sorted(set(steps))
    assert [values[s] for s in steps] == points
    assert (steps[0], steps[-1]) == (0, len(values) - 1)
    assert (min(points), max(points)) == (min(values), max(values))


@given(st.lists(FINITE, min_size=51, max_size=400), st.integers(1, 50))
def test_every_value_is_in_one_bucket(values: list[float], buckets: int) -> None:
    steps, means, counts = bucket_means(range(len(values)), values, buckets)
    assert len(steps) == len(means) == len(counts) == buckets
    assert steps == sorted(set(steps))
    assert sum(counts) == len(values)
    total = math.fsum(m * c for m, c in zip(means, counts, strict=True))
    assert total == pytest.approx(math.fsum(values), rel=1e-9, abs=1e-3)


def test_a_bucket_ignores_non_finite_values_and_is_nan_without_others() -> None:
    values = [1.0, math.nan, 3.0, math.nan, math.inf, math.nan]
    steps, means, counts = bucket_means([10, 11, 12, 13, 14, 15], values, 2)
    assert steps == [11, 14]
    assert means[0] == 2.0
    assert math.isnan(means[1])
    assert counts == [2, 0]
    assert envelope(range(6), [math.nan] * 6, 1)[0] == [0, 5]
