"""What n attempts are worth: mean, best, worst and majority of n, from N samples of each prompt.

Best and worst are exact expectations over subsets drawn without replacement, so best@N of N samples
is their maximum. (A bootstrap with replacement, as often used, is biased low.)
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence

_MAX_SUBSETS = 1000
"""Majority votes over more subsets than this are averaged over a fixed-seed sample of them."""


def best_at(values: Sequence[float], n: int) -> float:
    """Expected largest of n of the values."""
    ordered = sorted(values)
    total = math.comb(len(ordered), n)
    # The i-th smallest is the largest of a subset if the other n - 1 come from the i below it.
    return sum(v * math.comb(i, n - 1) for i, v in enumerate(ordered)) / total


def worst_at(values: Sequence[float], n: int) -> float:
    """Expected smallest of n of the values."""
    return -best_at([-v for v in values], n)


def majority_at(values: Sequence[float], answers: Sequence[Hashable], n: int) -> float:
    """Expected value of the most frequent answer among n; ties go to the answer seen first."""
    size = len(values)
    if math.comb(size, n) <= _MAX_SUBSETS:
        subsets = list(itertools.combinations(range(size), n))
    else:
        chooser = random.Random(size * 1009 + n)
        subsets = [tuple(sorted(chooser.sample(range(size), n))) for _ in range(_MAX_SUBSETS)]
    total = 0.0
    for subset in subsets:
        winner = Counter(answers[i] for i in subset).most_common(1)[0][0]
        total += next(values[i] for i in subset if answers[i] == winner)
    return total / len(subsets)


def sizes(samples: int) -> list[int]:
    """The n that are reported for N samples: 2, 4, 8, … below N, and N."""
    powers = itertools.takewhile(lambda n: n < samples, (2**k for k in itertools.count(1)))
    return [*powers, samples] if samples > 1 else [1]
