"""Mean, best, worst and majority of n attempts, from N samples per prompt.

Best and worst are exact expectations over subsets without replacement, so best@N of N samples is their
maximum. (The common bootstrap with replacement is biased low.) A majority is exact for up to 1,000
subsets; above, it is the mean over a fixed sample of 1,000 subsets.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np

_MAX_SUBSETS = 1000
"""Majority votes use a fixed-seed sample of this many subsets if there are more."""


def best_at(values: Sequence[float], n: int) -> float:
    """Returns the expected maximum of n values."""
    ordered = sorted(values)
    total = math.comb(len(ordered), n)
    # The i-th smallest is the maximum of a subset if the other n - 1 are among the i below it.
    return sum(v * math.comb(i, n - 1) for i, v in enumerate(ordered)) / total


def best_std_at(values: Sequence[float], n: int) -> float:
    """Returns the standard deviation of the maximum over all subsets of n; 0 for a single subset."""
    mean = best_at(values, n)
    ordered, total = sorted(values), math.comb(len(values), n)
    squares = ((v - mean) ** 2 * math.comb(i, n - 1) for i, v in enumerate(ordered))
    return math.sqrt(sum(squares) / total)


def worst_at(values: Sequence[float], n: int) -> float:
    """Returns the expected minimum of n values."""
    return -best_at([-v for v in values], n)


def worst_std_at(values: Sequence[float], n: int) -> float:
    """Returns the standard deviation of the minimum over all subsets of n."""
    return best_std_at([-v for v in values], n)


def majority_at(values: Sequence[float], answers: Sequence[Hashable | None], n: int) -> float:
    """Returns the expected value of the most frequent answer among n; ties are averaged.

    The value of an answer is the mean of its values in the subset. None does not vote; a subset without
    votes has the mean of its values.
    """
    return float(np.mean(_majority_worth(values, answers, n)))


def majority_std_at(values: Sequence[float], answers: Sequence[Hashable | None], n: int) -> float:
    """Returns the standard deviation of the most frequent answer's value, over the subsets of n."""
    return float(np.std(_majority_worth(values, answers, n)))


def _majority_worth(
    values: Sequence[float], answers: Sequence[Hashable | None], n: int
) -> np.ndarray:
    """Returns the majority value of each subset, [S]."""
    subsets = _subsets(len(values), n)  # [S, n]
    numbers: dict[Hashable | None, int] = {None: 0}
    codes = np.array([numbers.setdefault(answer, len(numbers)) for answer in answers])
    subset_codes = codes[subsets] + len(numbers) * np.arange(len(subsets))[:, None]
    counts = np.bincount(subset_codes.ravel(), minlength=len(numbers) * len(subsets))
    counts[:: len(numbers)] = 0  # None
    votes = counts[subset_codes]  # [S, n]: count of the answer in its subset
    # Tied answers have equally many votes, so the mean over their responses weights them equally.
    wins = votes == votes.max(axis=1, keepdims=True)
    worth = np.asarray(values, dtype=np.float64)[subsets]
    return (worth * wins).sum(axis=1) / wins.sum(axis=1)


@lru_cache(maxsize=64)
def _subsets(size: int, n: int) -> np.ndarray:
    """Returns all subsets of n of `size` positions, or a sample that is the same for every prompt."""
    if math.comb(size, n) <= _MAX_SUBSETS:
        return np.array(list(itertools.combinations(range(size), n)))
    chooser = random.Random(size * 1009 + n)
    return np.array([sorted(chooser.sample(range(size), n)) for _ in range(_MAX_SUBSETS)])


def sizes(samples: int) -> list[int]:
    """Returns the reported values of n for N samples: 2, 4, 8, … below N, and N."""
    powers = itertools.takewhile(lambda n: n < samples, (2**k for k in itertools.count(1)))
    return [*powers, samples] if samples > 1 else [1]
