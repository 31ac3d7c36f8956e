"""What process reward models are judged by, against numbers computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hone.trainer import prm_metrics as metrics

SOLUTIONS = [np.array(p) for p in ([0.9, 0.4, 0.2], [0.9, 0.8], [0.3, 0.9], [0.9, 0.9, 0.9])]
LABELS = np.array([1, -1, 1, 2])


def test_f1_is_the_harmonic_mean_of_finding_the_first_error_and_of_finding_none() -> None:
    answers = metrics.first_errors(SOLUTIONS, 0.5)
    assert answers.tolist() == [1, -1, 0, -1]
    # Of three wrong solutions one error is found at its step; the right solution is called right.
    assert metrics.process_bench(answers, LABELS) == pytest.approx(
        {"accuracy_wrong": 1 / 3, "accuracy_right": 1.0, "f1": 0.5}
    )
    empty = metrics.process_bench(np.full(4, -1), LABELS)
    assert empty["f1"] == 0.0


def test_the_lenient_measure_does_not_ask_for_the_step() -> None:
    # The third solution's soft minimum is below 0 too, although its error is at another step.
    assert metrics.lenient_f1(SOLUTIONS, LABELS) == pytest.approx(2 * (2 / 3) / (2 / 3 + 1))


def test_the_soft_minimum_has_the_golden_numbers_of_pure() -> None:
    assert metrics.soft_min(np.array([0.9, 0.2, -0.6])) == pytest.approx(-0.599731, abs=1e-6)
    assert metrics.soft_min(np.array([0.9, 0.8, 0.7])) == pytest.approx(0.74248, abs=1e-5)


def test_chance_guesses_among_the_steps_and_none() -> None:
    wrong, right = (1 / 4 + 1 / 3 + 1 / 4) / 3, 1 / 3
    by_hand = 2 * wrong * right / (wrong + right)
    steps = np.array([len(p) for p in SOLUTIONS])
    assert metrics.chance_f1(steps, LABELS) == pytest.approx(by_hand)


def test_the_threshold_is_the_one_with_the_highest_f1() -> None:
    solutions = [np.array([0.9, 0.7]), np.array([0.9, 0.8])]
    threshold = metrics.best_threshold(solutions, np.array([1, -1]))
    assert 0.7 < threshold < 0.8
    result = metrics.process_bench(metrics.first_errors(solutions, threshold), np.array([1, -1]))
    assert result["f1"] == 1.0


def test_wilsons_interval_and_the_area_under_the_curve() -> None:
    share = metrics.wilson_estimate(8, 10)
    assert (share.value, share.low, share.high) == pytest.approx((0.8, 0.4901625, 0.9433178))
    assert metrics.wilson_estimate(0, 0).low is None
    scores, good = np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True])
    assert metrics.area_under_curve(scores, good) == pytest.approx((2 + 1.5) / 4)
    assert metrics.area_under_curve(scores, np.ones(4, dtype=bool)) is None


def test_the_interval_of_f1_contains_it_and_narrows_with_more_solutions() -> None:
    answers, labels = np.array([1, -1, 0, -1] * 10), np.tile(LABELS, 10)
    low, high = metrics.bootstrap_f1(answers, labels)
    assert low < 0.5 < high
    more = metrics.bootstrap_f1(np.tile(answers, 10), np.tile(labels, 10))
    assert more[1] - more[0] < high - low


def test_the_best_of_n_and_weighted_votes() -> None:
    assert metrics.best_of_n_score([0.0, 1.0, 0.0], [0.1, 0.9, 0.3]) == 1.0
    assert metrics.best_of_n_score([0.0, 1.0], [0.5, 0.5]) == 0.5
    votes = ["3", "3", "2", None]
    scores = [0.0, 0.0, 1.0, 0.0]
    assert metrics.weighted_vote(scores, votes, [1, 1, 1, 1]) == 0.0
    assert metrics.weighted_vote(scores, votes, [0.2, 0.2, 0.9, 5]) == 1.0
    assert metrics.weighted_vote(scores, [None] * 4, [1] * 4) == 0.25
    assert math.isclose(metrics.AGGREGATES["product"](np.array([0.5, 0.5])), 0.25)
