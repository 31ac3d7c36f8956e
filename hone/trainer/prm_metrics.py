"""Computes metrics of a process reward model: ProcessBench, best-of-n and weighted majority votes.

ProcessBench asks for the first wrong step of a solution, if there is one. The model predicts the first step
whose p(good) is below a threshold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from hone.trainer.evaluation import Estimate

SOFT_MIN_TEMPERATURE = 0.1
"""PURE's temperature of the soft minimum over step scores."""

MAX_THRESHOLDS = 500
"""The largest number of thresholds to try; each threshold needs a pass over all solutions."""
BOOTSTRAP_SAMPLES = 1000

Probabilities = np.ndarray
"""p(good) of each step of one solution."""
Aggregate = Callable[[np.ndarray], float]


def soft_min(scores: np.ndarray) -> float:
    """Returns Σ softmax(−s/T)·s over the step scores s, with T = 0.1; PURE ranks responses by this value."""
    weights = np.exp(-(scores - scores.min()) / SOFT_MIN_TEMPERATURE)
    return float((weights * scores).sum() / weights.sum())


AGGREGATES: dict[str, Aggregate] = {
    "soft_min": lambda p: soft_min(2 * p - 1),
    "min": lambda p: float(p.min()),
    "product": lambda p: float(p.prod()),
    "last": lambda p: float(p[-1]),
    "mean": lambda p: float(p.mean()),
}
"""Functions that compute the score of a response from p(good) of its steps, by name."""


def first_errors(solutions: Sequence[Probabilities], threshold: float) -> np.ndarray:
    """Returns the index of each solution's first step with p(good) below the threshold, or -1."""
    low_steps = [np.flatnonzero(p < threshold) for p in solutions]
    return np.array([steps[0] if len(steps) else -1 for steps in low_steps])


def process_bench(predictions: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the accuracies on wrong and on right solutions, and their harmonic mean (F1).

    A prediction or label is the index of the first wrong step, or -1 for a right solution.
    """
    return _accuracies(predictions == labels, labels)


def _accuracies(p_correct: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Returns the accuracies; `p_correct` is the probability per solution that its prediction is right."""
    has_error = labels >= 0
    wrong, right = (
        float(p_correct[mask].mean()) if mask.any() else 0.0 for mask in (has_error, ~has_error)
    )
    f1 = 2 * wrong * right / (wrong + right) if wrong + right > 0 else 0.0
    return {"accuracy_wrong": wrong, "accuracy_right": right, "f1": f1}


def lenient_f1(solutions: Sequence[Probabilities], labels: np.ndarray) -> float:
    """Returns the F1 of PURE's script, which predicts whether a solution has an error, at any step.

    It predicts an error if the soft minimum of the step scores, 2·p(good) − 1, is 0 or less.
    """
    predicted_wrong = np.array([soft_min(2 * p - 1) <= 0 for p in solutions])
    return process_bench(np.where(predicted_wrong, 0, -1), np.where(labels >= 0, 0, -1))["f1"]


def chance_f1(step_counts: np.ndarray, labels: np.ndarray) -> float:
    """Returns the F1 of random predictions: "no error" and each step are equally probable."""
    return _accuracies(1.0 / (step_counts + 1), labels)["f1"]


def best_threshold(solutions: Sequence[Probabilities], labels: np.ndarray) -> float:
    """Returns the threshold with the highest F1 on these solutions."""
    probabilities = np.unique(np.concatenate(list(solutions)))
    thresholds = (probabilities[1:] + probabilities[:-1]) / 2
    if len(thresholds) > MAX_THRESHOLDS:
        thresholds = np.quantile(thresholds, np.linspace(0, 1, MAX_THRESHOLDS))
    f1_scores = [process_bench(first_errors(solutions, t), labels)["f1"] for t in thresholds]
    return float(thresholds[int(np.argmax(f1_scores))]) if len(thresholds) else 0.5


def bootstrap_f1(predictions: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Returns the 95 % percentile interval of F1 over resampled solutions."""
    generator = np.random.default_rng(1)
    samples = (generator.integers(len(labels), size=len(labels)) for _ in range(BOOTSTRAP_SAMPLES))
    f1_scores = [process_bench(predictions[i], labels[i])["f1"] for i in samples]
    low, high = np.quantile(f1_scores, [0.025, 0.975])
    return float(low), float(high)


def wilson_estimate(successes: int, trials: int) -> Estimate:
    """Returns the fraction of successes with its 95 % Wilson interval."""
    if not trials:
        return Estimate(0.0, None, None)
    z = 1.959963984540054  # the 97.5 % quantile of the normal distribution
    p, z2_over_n = successes / trials, z * z / trials
    middle = (p + z2_over_n / 2) / (1 + z2_over_n)
    half_width = z * ((p * (1 - p) + z2_over_n / 4) / trials) ** 0.5 / (1 + z2_over_n)
    return Estimate(p, max(0.0, middle - half_width), min(1.0, middle + half_width))


def area_under_curve(scores: np.ndarray, is_good: np.ndarray) -> float | None:
    """Returns the area under the ROC curve: the probability that a good step scores above a bad one."""
    if is_good.all() or not is_good.any():
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    mid_ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    num_good = int(is_good.sum())
    num_ordered_pairs = mid_ranks[is_good].sum() - num_good * (num_good + 1) / 2
    return float(num_ordered_pairs / (num_good * (len(is_good) - num_good)))


def best_of_n_score(scores: Sequence[float], model_scores: Sequence[float]) -> float:
    """Returns the score of the response with the highest model score; the mean score if several tie."""
    highest = max(model_scores)
    top_scores = [s for s, m in zip(scores, model_scores, strict=True) if m == highest]
    return sum(top_scores) / len(top_scores)


def weighted_vote(
    scores: Sequence[float], votes: Sequence[Hashable | None], weights: Sequence[float]
) -> float:
    """Returns the mean score of the answer whose responses have the largest sum of weights.

    A vote of None does not count. If answers tie, the result is the mean over these answers. Without any
    vote, the result is the mean of all scores.
    """
    totals: defaultdict[Hashable, float] = defaultdict(float)
    for vote, weight in zip(votes, weights, strict=True):
        if vote is not None:
            totals[vote] += weight
    if not totals:
        return float(np.mean(scores))
    max_total = max(totals.values())
    winners = [vote for vote, total in totals.items() if total == max_total]
    mean_scores = []
    for winner in winners:
        winner_scores = [s for s, vote in zip(scores, votes, strict=True) if vote == winner]
        mean_scores.append(np.mean(winner_scores))
    return float(np.mean(mean_scores))
