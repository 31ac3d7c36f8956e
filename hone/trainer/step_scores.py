"""Metrics of a process reward model: ProcessBench, best-of-n and weighted majority votes.

The prediction for a solution of ProcessBench is its first step with p(good) below a threshold, or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from hone.trainer.evaluation import Estimate

SOFT_MIN_TEMPERATURE = 0.1
"""PURE's temperature of the soft minimum over step scores."""

Probabilities = np.ndarray
"""p(good) of each step of one solution."""
Aggregate = Callable[[np.ndarray], float]


def soft_min(scores: np.ndarray) -> float:
    """Returns Σ softmax(−s/T)·s, by which PURE's best-of-n ranks responses."""
    weights = np.exp(-(scores - scores.min()) / SOFT_MIN_TEMPERATURE)
    return float((weights * scores).sum() / weights.sum())


AGGREGATES: dict[str, Aggregate] = {
    "soft_min": lambda p: soft_min(2 * p - 1),
    "min": lambda p: float(p.min()),
    "product": lambda p: float(p.prod()),
    "last": lambda p: float(p[-1]),
    "mean": lambda p: float(p.mean()),
}
"""The score of a response, from p(good) of its steps."""


def first_errors(solutions: Sequence[Probabilities], threshold: float) -> np.ndarray:
    """Returns the number of each solution's first step below the threshold, or -1."""
    below = [np.flatnonzero(p < threshold) for p in solutions]
    return np.array([steps[0] if len(steps) else -1 for steps in below])


def harmonic_mean(first: float, second: float) -> float:
    return 2 * first * second / (first + second) if first + second > 0 else 0.0


def process_bench(answers: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns ProcessBench's accuracies on wrong and on right solutions, and F1, their harmonic mean."""
    hits, wrong = answers == labels, labels >= 0
    on_wrong, on_right = (
        float(hits[rows].mean()) if rows.any() else 0.0 for rows in (wrong, ~wrong)
    )
    return {
        "accuracy_wrong": on_wrong,
        "accuracy_right": on_right,
        "f1": harmonic_mean(on_wrong, on_right),
    }


def lenient_f1(solutions: Sequence[Probabilities], labels: np.ndarray) -> float:
    """Returns the F1 of PURE's script, which predicts only whether a solution has an error, not where.

    A solution counts as wrong if the soft minimum of its step scores is 0 or less.
    """
    predicted_wrong = np.array([soft_min(2 * p - 1) <= 0 for p in solutions])
    return process_bench(np.where(predicted_wrong, 0, -1), np.where(labels >= 0, 0, -1))["f1"]


def chance_f1(steps: np.ndarray, labels: np.ndarray) -> float:
    """Returns the F1 of the expected accuracies of a uniform guess among all steps and "no error"."""
    chances, wrong = 1.0 / (steps + 1), labels >= 0
    return harmonic_mean(
        *(float(chances[rows].mean()) if rows.any() else 0.0 for rows in (wrong, ~wrong))
    )


def best_threshold(solutions: Sequence[Probabilities], labels: np.ndarray) -> float:
    """Returns the threshold with the highest F1, as the paper chooses it on its GSM8K subset."""
    values = np.unique(np.concatenate(list(solutions)))
    thresholds = (values[1:] + values[:-1]) / 2
    if len(thresholds) > 500:
        thresholds = np.quantile(thresholds, np.linspace(0, 1, 500))
    scores = [process_bench(first_errors(solutions, t), labels)["f1"] for t in thresholds]
    return float(thresholds[int(np.argmax(scores))]) if len(thresholds) else 0.5


def bootstrap_f1(answers: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Returns the 95 % percentile interval of F1 over resampled solutions."""
    generator = np.random.default_rng(1)
    draws = (generator.integers(len(labels), size=len(labels)) for _ in range(1000))
    scores = [process_bench(answers[rows], labels[rows])["f1"] for rows in draws]
    low, high = np.quantile(scores, [0.025, 0.975])
    return float(low), float(high)


def wilson(hits: int, count: int) -> Estimate:
    """Returns a share with its 95 % Wilson interval."""
    if not count:
        return Estimate(0.0, None, None)
    z = 1.959963984540054
    share, square = hits / count, z * z / count
    middle = (share + square / 2) / (1 + square)
    half_width = z * ((share * (1 - share) + square / 4) / count) ** 0.5 / (1 + square)
    return Estimate(share, max(0.0, middle - half_width), min(1.0, middle + half_width))


def area_under_curve(scores: np.ndarray, good: np.ndarray) -> float | None:
    """Returns the area under the ROC curve: the probability that a good step scores above a bad one."""
    if good.all() or not good.any():
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positives = int(good.sum())
    below = ranks[good].sum() - positives * (positives + 1) / 2
    return float(below / (positives * (len(good) - positives)))


def best_of(scores: Sequence[float], ranks: Sequence[float]) -> float:
    """Returns the score of the response with the highest rank; the mean over ties."""
    top = [s for s, r in zip(scores, ranks, strict=True) if r == max(ranks)]
    return sum(top) / len(top)


def weighted_vote(
    scores: Sequence[float], votes: Sequence[Hashable | None], weights: Sequence[float]
) -> float:
    """Returns the mean score of the answer whose responses have the largest sum of weights.

    None does not vote; without any vote it is the mean of all scores.
    """
    totals: defaultdict[Hashable, float] = defaultdict(float)
    for vote, weight in zip(votes, weights, strict=True):
        if vote is not None:
            totals[vote] += weight
    if not totals:
        return float(np.mean(scores))
    best = max(totals.values())
    winners = [vote for vote, total in totals.items() if total == best]
    pairs = list(zip(scores, votes, strict=True))
    return float(np.mean([np.mean([s for s, v in pairs if v == winner]) for winner in winners]))
