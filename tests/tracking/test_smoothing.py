from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.tracking.smoothing import smooth, stretch_means, thin

FINITE = st.floats(-1e6, 1e6)


@given(st.lists(FINITE), st.floats(0, 0.99))
def test_each_point_is_the_weighted_mean_of_those_before(values: list[float], w: float) -> None:
    smoothed = smooth(values, w)
    for i, got in enumerate(smoothed):
        weights = [w ** (i - j) for j in range(i + 1)]
        want = math.fsum(a * b for a, b in zip(weights, values, strict=False)) / math.fsum(weights)
        assert got == pytest.approx(want, rel=1e-9, abs=1e-3)


def test_no_weight_changes_nothing_and_a_constant_stays() -> None:
    assert smooth([3.0, 1.0, 2.0], 0) == [3.0, 1.0, 2.0]
    assert smooth([5.0] * 4, 0.9) == pytest.approx([5.0] * 4)


def test_what_is_not_finite_does_not_spread() -> None:
    smoothed = smooth([1.0, math.nan, 1.0], 0.5)
    assert math.isnan(smoothed[1])
    assert smoothed[2] == pytest.approx(1.0)


@pytest.mark.parametrize("weight", [-0.1, 1.0])
def test_a_weight_outside_its_range_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight must be in"):
        smooth([1.0], weight)


@given(st.lists(FINITE, min_size=1, max_size=400), st.integers(4, 50))
def test_thinning_keeps_ends_and_extremes_within_the_limit(values: list[float], limit: int) -> None:
    steps = list(range(len(values)))
    kept_steps, kept = thin(steps, values, limit)
    assert len(kept) <= limit
    assert kept_steps == sorted(set(kept_steps))
    assert [values[s] for s in kept_steps] == kept
    assert (kept_steps[0], kept_steps[-1]) == (0, len(values) - 1)
    assert (min(kept), max(kept)) == (min(values), max(values))


def test_a_short_curve_is_not_thinned() -> None:
    assert thin([1, 2], [3.0, math.nan], 5)[0] == [1, 2]


@given(st.lists(st.tuples(FINITE, st.integers(1, 5)), max_size=40), st.floats(0, 0.99))
def test_a_counted_value_is_that_many_equal_ones(pairs: list[tuple[float, int]], w: float) -> None:
    values, counts = [v for v, _ in pairs], [c for _, c in pairs]
    written_out = smooth([v for v, c in pairs for _ in range(c)], w)
    last = [sum(counts[: i + 1]) - 1 for i in range(len(counts))]
    assert smooth(values, w, counts) == pytest.approx([written_out[i] for i in last], abs=1e-3)


@given(st.lists(FINITE, min_size=1, max_size=400), st.integers(1, 50))
def test_stretches_hold_every_value_once(values: list[float], limit: int) -> None:
    steps, means, counts = stretch_means(range(len(values)), values, limit)
    counts = counts or [1] * len(values)
    assert len(steps) == len(means) == len(counts) <= limit
    assert steps == sorted(set(steps))
    assert sum(counts) == len(values)
    total = math.fsum(m * c for m, c in zip(means, counts, strict=True))
    assert total == pytest.approx(math.fsum(values), rel=1e-9, abs=1e-3)


def test_a_stretch_leaves_out_what_is_not_finite_and_nothing_else_is_a_gap() -> None:
    values = [1.0, math.nan, 3.0, math.nan, math.inf, math.nan]
    steps, means, counts = stretch_means([10, 11, 12, 13, 14, 15], values, 4)
    assert steps == [11, 14]
    assert means[0] == 2.0
    assert math.isnan(means[1])
    assert counts == [2, 0]
    assert thin(range(6), [math.nan] * 6, 4)[0] == [0, 5]
