"""Smoothing and downsampling of a curve before it is drawn; the numbers on disk stay as they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DEFAULT_WEIGHT = 0.6
FEW_POINTS = 12
"""Curves this short are drawn unsmoothed, with their points marked."""
MEASUREMENTS = ("val-core/", "val-aux/", "val/")
"""Metrics measured on held-out rows are never smoothed."""

Steps = Sequence[int] | NDArray[np.int64]
Values = Sequence[float] | NDArray[np.float64]


def drawn_as_is(key: str, points: int) -> bool:
    """Whether a curve is drawn without smoothing."""
    return points <= FEW_POINTS or key.startswith(MEASUREMENTS)


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average, bias-corrected at the start; weight 0 leaves the curve as it is.

    A value that is not finite is passed on and does not enter the average.
    """
    if not 0 <= weight < 1:
        raise ValueError(f"smoothing weight must be in [0, 1), got {weight}")
    smoothed: list[float] = []
    total = mass = 0.0
    for value in values:
        if math.isfinite(value):
            total = weight * total + (1 - weight) * value
            mass = weight * mass + (1 - weight)
            value = total / mass
        smoothed.append(value)
    return smoothed


class Means(NamedTuple):
    """A curve in buckets of consecutive points: the middle step, the mean and the size of each."""

    steps: list[int]
    values: list[float]
    counts: list[int]


def bucket_means(steps: Steps, values: Values, buckets: int) -> Means:
    """The mean of each bucket over its finite values; a bucket without any is a gap (NaN)."""
    numbers = np.asarray(values, np.float64)
    means = Means([], [], [])
    for start, stop in _buckets(len(numbers), buckets):
        inside = numbers[start:stop]
        finite = inside[np.isfinite(inside)]
        means.steps.append(int(steps[(start + stop) // 2]))
        means.values.append(float(finite.mean()) if len(finite) else math.nan)
        means.counts.append(len(finite))
    return means


def envelope(steps: Steps, values: Values, buckets: int) -> tuple[list[int], list[float]]:
    """The first and last point, and the lowest and highest of each bucket: peaks survive."""
    numbers, at = np.asarray(values, np.float64), np.asarray(steps)
    points = {0, len(numbers) - 1}
    for start, stop in _buckets(len(numbers), buckets):
        inside = numbers[start:stop]
        finite = np.flatnonzero(np.isfinite(inside))
        extremes = (inside[finite].argmin(), inside[finite].argmax()) if len(finite) else ()
        points |= {start + finite[i] for i in extremes} or {start}
    order = sorted(points)
    return at[order].tolist(), numbers[order].tolist()


def _buckets(count: int, buckets: int) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(i * count // buckets for i in range(buckets + 1))
