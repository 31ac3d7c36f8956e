"""Mean, best, worst and majority of n attempts, from N samples of each prompt.

Best and worst are exact expectations over subsets drawn without replacement, so best@N of N samples
is their maximum. (A bootstrap with replacement, as often used, is biased low.) A majority is exact up
to 1,000 subsets; beyond, it is the mean over a sample of 1,000 of them, the same in every run.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Hashable, Sequence
from functools import lru_cache

import numpy as np

_MAX_SUBSETS = 1000
"""Majority votes over more subsets than this are averaged over a fixed-seed sample of them."""


def best_at(values: Sequence[float], n: int) -> float:
    """Expected largest of n of the values."""
    ordered = sorted(values)
    total = math.comb(len(ordered), n)
    # The i-th smallest is the largest of a subset if the other n - 1 come from the i below it.
    return sum(v * math.comb(i, n - 1) for i, v in enumerate(ordered)) / total


def best_std_at(values: Sequence[float], n: int) -> float:
    """Deviation of the largest of n of the values, over all subsets; 0 where n takes them all."""
    mean = best_at(values, n)
    ordered, total = sorted(values), math.comb(len(values), n)
    squares = ((v - mean) ** 2 * math.comb(i, n - 1) for i, v in enumerate(ordered))
    return math.sqrt(sum(squares) / total)


def worst_at(values: Sequence[float], n: int) -> float:
    """Expected smallest of n of the values."""
    return -best_at([-v for v in values], n)


def worst_std_at(values: Sequence[float], n: int) -> float:
    """Deviation of the smallest of n of the values, over all subsets."""
    return best_std_at([-v for v in values], n)


def majority_at(values: Sequence[float], answers: Sequence[Hashable | None], n: int) -> float:
    """Expected value of the most frequent answer among n; tied answers share the win equally.

    An answer is worth the mean of its values in the subset. None casts no vote; where no answer is
    voted for, the subset is worth the mean of its values.
    """
    return float(np.mean(_majority_worth(values, answers, n)))


def majority_std_at(values: Sequence[float], answers: Sequence[Hashable | None], n: int) -> float:
    """Deviation of the value of the most frequent answer among n, over the subsets."""
    return float(np.std(_majority_worth(values, answers, n)))


def _majority_worth(
    values: Sequence[float], answers: Sequence[Hashable | None], n: int
) -> np.ndarray:
    """[S] what the majority of each subset is worth."""
    subsets = _subsets(len(values), n)  # [S, n]
    numbers: dict[Hashable | None, int] = {None: 0}
    codes = np.array([numbers.setdefault(answer, len(numbers)) for answer in answers])
    drawn = codes[subsets] + len(numbers) * np.arange(len(subsets))[:, None]
    counts = np.bincount(drawn.ravel(), minlength=len(numbers) * len(subsets))
    counts[:: len(numbers)] = 0  # None
    votes = counts[drawn]  # [S, n]: how often its answer is in the subset
    # Tied answers have as many votes each, so the mean over their responses shares equally.
    wins = votes == votes.max(axis=1, keepdims=True)
    worth = np.asarray(values, dtype=np.float64)[subsets]
    return (worth * wins).sum(axis=1) / wins.sum(axis=1)


@lru_cache(maxsize=64)
def _subsets(size: int, n: int) -> np.ndarray:
    """All subsets of n of `size` positions, or a sample of them: the same for every prompt."""
    if math.comb(size, n) <= _MAX_SUBSETS:
        return np.array(list(itertools.combinations(range(size), n)))
    chooser = random.Random(size * 1009 + n)
    return np.array([sorted(chooser.sample(range(size), n)) for _ in range(_MAX_SUBSETS)])


def sizes(samples: int) -> list[int]:
    """The n that are reported for N samples: 2, 4, 8, … below N, and N."""
    powers = itertools.takewhile(lambda n: n < samples, (2**k for k in itertools.count(1)))
    return [*powers, samples] if samples > 1 else [1]
