"""What n attempts are worth, against all subsets."""

from __future__ import annotations

import itertools
from collections import Counter
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.ops.at_n import best_at, majority_at, sizes, worst_at

VALUES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=7)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(values=VALUES, data=st.data())
def test_best_and_worst_are_means_over_all_subsets(values, data):
    n = data.draw(st.integers(1, len(values)))
    subsets = list(itertools.combinations(values, n))
    assert best_at(values, n) == pytest.approx(mean(map(max, subsets)))
    assert worst_at(values, n) == pytest.approx(mean(map(min, subsets)))


def test_best_of_all_is_the_largest_and_best_of_one_the_mean():
    values = [0.0, 1.0, 0.0, 0.0]
    assert best_at(values, 4) == 1.0
    assert worst_at(values, 4) == 0.0
    assert best_at(values, 1) == worst_at(values, 1) == 0.25
    assert best_at(values, 2) == pytest.approx(0.5)  # pass@2 of 1 in 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(answers=st.lists(st.sampled_from("abc"), min_size=1, max_size=6), data=st.data())
def test_majority_is_the_mean_over_all_subsets(answers, data):
    n = data.draw(st.integers(1, len(answers)))
    worth = {"a": 1.0, "b": 0.25, "c": -2.0}
    values = [worth[a] for a in answers]

    def winner(subset):
        counts = Counter(subset)
        most = max(counts.values())
        return next(a for a in subset if counts[a] == most)

    expected = mean(worth[winner(s)] for s in itertools.combinations(answers, n))
    assert majority_at(values, answers, n) == pytest.approx(expected)


def test_many_subsets_are_sampled_the_same_way_each_time():
    answers = [i % 3 for i in range(40)]
    values = [float(a == 0) for a in answers]
    first = majority_at(values, answers, 9)
    assert first == majority_at(values, answers, 9)
    assert 0.25 < first < 0.6


def test_reported_sizes_are_powers_of_two_and_the_whole():
    assert sizes(1) == [1]
    assert sizes(2) == [2]
    assert sizes(6) == [2, 4, 6]
    assert sizes(8) == [2, 4, 8]
