"""Best, worst and majority of n attempts, estimated from N samples per prompt.

Best and worst are exact expectations over all subsets of n samples; the common bootstrap with
replacement is biased. A majority value is the mean over all subsets, or over 1,000 random ones.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np

_MAX_SUBSETS = 1000
"""If there are more subsets, a majority uses this many random subsets, with a fixed seed."""


def best_at(values: Sequence[float], n: int) -> float:
    """Returns the expected maximum of n of the values."""
    largest, weights = max(values), _maximum_weights(len(values), n)
    if math.isinf(largest):  # a deviation from it would be NaN
        return largest
    # The weights sum to 1 up to rounding; sums of deviations are exact for equal values.
    pairs = zip(sorted(values), weights, strict=True)
    return largest + sum((value - largest) * weight for value, weight in pairs)


def best_std_at(values: Sequence[float], n: int) -> float:
    """Returns the standard deviation of the maximum of n values, over all subsets."""
    mean, weights = best_at(values, n), _maximum_weights(len(values), n)
    return math.sqrt(
        sum((v - mean) ** 2 * weight for v, weight in zip(sorted(values), weights, strict=True))
    )


@lru_cache(maxsize=64)
def _maximum_weights(num_values: int, n: int) -> list[float]:
    """Returns the probability that the i-th smallest value is the maximum of a random subset of n."""
    num_subsets = math.comb(num_values, n)
    # The other n - 1 values of such a subset are below it.
    return [math.comb(i, n - 1) / num_subsets for i in range(num_values)]


def worst_at(values: Sequence[float], n: int) -> float:
    """Returns the expected minimum of n of the values."""
    return -best_at([-v for v in values], n)


def worst_std_at(values: Sequence[float], n: int) -> float:
    """Returns the standard deviation of the minimum of n values, over all subsets."""
    return best_std_at([-v for v in values], n)


def majority_at(values: Sequence[float], answers: Sequence[Hashable | None], n: int) -> float:
    """Returns the expected value of the most frequent of n answers; ties are averaged.

    The value of an answer is the mean value of the responses in the subset that give it. An answer
    of None has no vote; a subset without votes has the mean value of its responses.
    """
    return float(np.mean(_majority_values(values, answers, n)))


def majority_std_at(values: Sequence[float], answers: Sequence[Hashable | None], n: int) -> float:
    """Returns the standard deviation of the most frequent answer's value, over the subsets."""
    return float(np.std(_majority_values(values, answers, n)))


def _majority_values(
    values: Sequence[float], answers: Sequence[Hashable | None], n: int
) -> np.ndarray:
    """Returns [S]: the value of the majority answer in each subset."""
    subsets = _subsets(len(values), n)  # [S, n]
    code_by_answer: dict[Hashable | None, int] = {None: 0}
    codes = np.array([code_by_answer.setdefault(answer, len(code_by_answer)) for answer in answers])
    subset_codes = codes[subsets] + len(code_by_answer) * np.arange(len(subsets))[:, None]
    counts = np.bincount(subset_codes.ravel(), minlength=len(code_by_answer) * len(subsets))
    counts[:: len(code_by_answer)] = 0  # an answer of None has no vote
    votes = counts[subset_codes]  # [S, n]: count of the answer in its subset
    # Tied answers have equally many responses, so this mean weights them equally.
    is_majority = votes == votes.max(axis=1, keepdims=True)
    subset_values = np.asarray(values, dtype=np.float64)[subsets]
    return (subset_values * is_majority).sum(axis=1) / is_majority.sum(axis=1)


@lru_cache(maxsize=64)
def _subsets(num_items: int, n: int) -> np.ndarray:
    """Returns [S, n]: all subsets of n out of `num_items` indices, or random ones with a fixed seed."""
    if math.comb(num_items, n) <= _MAX_SUBSETS:
        return np.array(list(itertools.combinations(range(num_items), n)))
    rng = random.Random(num_items * 1009 + n)
    return np.array([sorted(rng.sample(range(num_items), n)) for _ in range(_MAX_SUBSETS)])


def attempt_counts(num_samples: int) -> list[int]:
    """Returns the reported values of n for N samples: 2, 4, 8, … below N, and N."""
    powers = itertools.takewhile(lambda n: n < num_samples, (2**k for k in itertools.count(1)))
    return [*powers, num_samples] if num_samples > 1 else [1]
