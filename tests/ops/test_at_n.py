"""Best, worst and majority of n attempts, against all subsets."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from statistics import mean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.ops.at_n import (
    attempt_counts,
    best_at,
    best_std_at,
    majority_at,
    majority_std_at,
    worst_at,
    worst_std_at,
)

VALUES = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=7)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(values=VALUES, data=st.data())
def test_best_and_worst_are_means_over_all_subsets(values, data):
    n = data.draw(st.integers(1, len(values)))
    subsets = list(itertools.combinations(values, n))
    assert best_at(values, n) == pytest.approx(mean(map(max, subsets)))
    assert worst_at(values, n) == pytest.approx(mean(map(min, subsets)))
    assert best_std_at(values, n) == pytest.approx(pstdev(map(max, subsets)), abs=1e-12)
    assert worst_std_at(values, n) == pytest.approx(pstdev(map(min, subsets)), abs=1e-12)


def test_best_of_all_is_the_largest_and_best_of_one_the_mean():
    values = [0.0, 1.0, 0.0, 0.0]
    assert best_at(values, 4) == 1.0
    assert worst_at(values, 4) == 0.0
    assert best_at(values, 1) == worst_at(values, 1) == 0.25
    assert best_at(values, 2) == pytest.approx(0.5)  # pass@2 of 1 in 4
    assert best_std_at(values, 2) == pytest.approx(0.5)  # 0 and 1, as often
    assert best_std_at(values, 4) == 0.0


def vote(values, answers):
    """The reference: the mean value of the answers with the most votes."""
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return mean(values)
    most = max(counts.values())
    winners = [answer for answer, count in counts.items() if count == most]
    return mean(
        mean(v for v, a in zip(values, answers, strict=True) if a == winner) for winner in winners
    )


def every_vote(values, answers, n):
    pairs = list(zip(values, answers, strict=True))
    return [vote(*zip(*subset, strict=True)) for subset in itertools.combinations(pairs, n)]


ATTEMPTS = st.lists(
    st.tuples(st.sampled_from([1.0, 0.25, -2.0]), st.sampled_from(["a", "b", "c", None])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(attempts=ATTEMPTS, data=st.data())
def test_majority_is_the_mean_over_all_subsets_in_any_order(attempts, data):
    n = data.draw(st.integers(1, len(attempts)))
    values, answers = zip(*attempts, strict=True)
    worth = every_vote(values, answers, n)
    expected = mean(worth)
    assert majority_at(values, answers, n) == pytest.approx(expected)
    assert majority_std_at(values, answers, n) == pytest.approx(pstdev(worth), abs=1e-12)
    moved_values, moved = zip(*data.draw(st.permutations(attempts)), strict=True)
    assert majority_at(moved_values, moved, n) == pytest.approx(expected)


def test_tied_answers_have_their_mean_value():
    """The right answer comes last, so it would lose ties that go to the first answer."""
    values, answers = [0.0, 0.0, 0.0, 1.0], ["a", "b", "c", "right"]
    assert majority_at(values, answers, 2) == pytest.approx(0.25)


def test_a_response_without_an_answer_has_no_vote_unless_no_response_has_one():
    values, answers = [0.0, 0.0, 1.0], [None, None, "right"]
    assert majority_at(values, answers, 3) == 1.0
    assert majority_at(values, answers, 2) == pytest.approx(2 / 3)
    assert majority_at([0.5, 0.0], [None, None], 2) == pytest.approx(0.25)


def test_many_subsets_are_sampled_the_same_way_each_time():
    answers = [i % 3 for i in range(40)]
    values = [float(a == 0) for a in answers]
    first = majority_at(values, answers, 9)
    assert first == majority_at(values, answers, 9)
    assert 0.25 < first < 0.6


def test_a_majority_over_random_subsets_is_their_mean():
    generator = random.Random(5)
    for _ in range(5):
        answers = [generator.choice(["a", "b", "c", None]) for _ in range(20)]
        values = [generator.random() for _ in range(20)]
        random_source = random.Random(20 * 1009 + 6)
        expected = []
        for _ in range(1000):
            subset = random_source.sample(range(20), 6)
            expected.append(vote([values[i] for i in subset], [answers[i] for i in subset]))
        assert majority_at(values, answers, 6) == pytest.approx(mean(expected), abs=1e-12)


def test_reported_sizes_are_powers_of_two_and_the_whole():
    assert attempt_counts(1) == [1]
    assert attempt_counts(2) == [2]
    assert attempt_counts(6) == [2, 4, 6]
    assert attempt_counts(8) == [2, 4, 8]


@pytest.mark.parametrize("count", [7, 21, 27, 31])
def test_equal_values_have_exactly_that_value_and_no_deviation(count: int) -> None:
    values = [0.1] * count
    for n in (2, 4):
        assert best_at(values, n) == worst_at(values, n) == 0.1
        assert best_std_at(values, n) == worst_std_at(values, n) == 0.0


def test_an_infinite_value_is_the_best_or_the_worst() -> None:
    assert best_at([0.0, 1.0, math.inf], 2) == math.inf
    assert worst_at([0.0, 1.0, -math.inf], 2) == -math.inf


def test_thousands_of_attempts_have_a_finite_best() -> None:
    values = [0.0] * 1500 + [1.0] * 548
    exact = 1 - math.comb(1500, 1024) / math.comb(2048, 1024)
    assert best_at(values, 1024) == pytest.approx(exact, rel=1e-12)
    assert best_at(values, 2) == pytest.approx(1 - 1500 * 1499 / (2048 * 2047), rel=1e-12)
    assert worst_std_at(values, 1024) < 1e-9
