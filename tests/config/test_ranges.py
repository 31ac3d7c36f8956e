"""The formats of the bounds of rollout correction."""

from __future__ import annotations

import math

import pytest

from hone.config.ranges import parse_bound, rejection_bounds, split_list


def test_a_bound_is_one_number_or_a_lower_and_an_upper_one() -> None:
    assert parse_bound(2, "k") == (2.0,)
    assert parse_bound("0.5_2.0", "k") == (0.5, 2.0)
    assert parse_bound("1_1", "k") == (1, 1)


@pytest.mark.parametrize(("bound", "low", "high"), [(4, 0.25, 4), (1, 1, 1), ("0.5_3", 0.5, 3)])
def test_k1_is_bounded_by_bounds_of_the_ratio(bound: float | str, low: float, high: float) -> None:
    ((_, min_k1, max_k1),) = rejection_bounds("token_k1", bound)
    assert (math.exp(-max_k1), math.exp(-min_k1)) == pytest.approx((low, high))


def test_options_and_bounds_are_lists_or_text_with_commas() -> None:
    assert split_list(None) == []
    assert split_list(" a , b,") == ["a", "b"]
    assert split_list(0.5) == [0.5]
    assert split_list(("a", "b")) == ["a", "b"]
    expected = [("token_k2", -math.inf, 1.0), ("seq_mean_k3", -math.inf, 2.0)]
    assert rejection_bounds(["token_k2", "seq_mean_k3"], ["1", "2"]) == expected
    assert rejection_bounds("token_k2,seq_mean_k3", "1,2") == expected
