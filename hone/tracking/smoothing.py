"""Smoothing and thinning of a curve before it is drawn; the numbers on disk stay as they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DEFAULT_WEIGHT = 0.6
FEW_POINTS = 12
"""Curves this short are drawn as they are, with their points marked."""
MEASUREMENTS = ("val-core/", "val-aux/", "val/")
"""Metrics whose every point is a measurement on held-out rows: they are never smoothed."""

Steps = Sequence[int] | NDArray[np.int64]
Values = Sequence[float] | NDArray[np.float64]


def drawn_as_is(key: str, points: int) -> bool:
    """Whether a curve is drawn through its points, without smoothing."""
    return points <= FEW_POINTS or key.startswith(MEASUREMENTS)


def smooth(
    values: Sequence[float], weight: float, counts: Sequence[int] | None = None
) -> list[float]:
    """Exponential moving average without the pull towards zero at the start.

    Point i is the average of points 0..i, each step back counting `weight` times less; weight 0
    leaves the curve as it is. A value that is not finite is passed on and otherwise left out.
    With `counts`, value i stands for that many equal ones.
    """
    if not 0 <= weight < 1:
        raise ValueError(f"smoothing weight must be in [0, 1), got {weight}")
    smoothed: list[float] = []
    total = mass = 0.0
    for i, value in enumerate(values):
        if not math.isfinite(value):
            smoothed.append(value)
            continue
        kept = weight ** (counts[i] if counts else 1)
        total = kept * total + (1 - kept) * value
        mass = kept * mass + (1 - kept)
        smoothed.append(total / mass)
    return smoothed


class Means(NamedTuple):
    """A curve cut into stretches: the step in the middle of each, its mean, how many it holds."""

    steps: list[int]
    values: list[float]
    counts: list[int] | None
    """None: every stretch is one point, the curve itself."""


def stretch_means(steps: Steps, values: Values, at_most: int) -> Means:
    """A curve of more than `at_most` points as the means of half as many stretches.

    The mean height of the curve stays what it is. Values that are not finite are left out; a
    stretch of nothing else is a gap.
    """
    numbers = np.asarray(values, np.float64)
    if len(numbers) <= at_most:
        return Means(np.asarray(steps).tolist(), numbers.tolist(), None)
    middles, means, counts = [], [], []
    for start, stop in _stretches(len(numbers), max(1, at_most // 2)):
        inside = numbers[start:stop]
        finite = inside[np.isfinite(inside)]
        middles.append(int(steps[(start + stop) // 2]))
        means.append(float(finite.mean()) if len(finite) else math.nan)
        counts.append(len(finite))
    return Means(middles, means, counts)


def thin(steps: Steps, values: Values, at_most: int) -> tuple[list[int], list[float]]:
    """At most about `at_most` of the points, keeping each stretch's lowest and highest.

    Peaks and dips survive, unlike with every n-th point; the first and last point always do. What
    is kept is an envelope: its mean says nothing about the curve's (`stretch_means` does).
    """
    numbers, at = np.asarray(values, np.float64), np.asarray(steps)
    count = len(numbers)
    if count <= at_most:
        return at.tolist(), numbers.tolist()
    kept = {0, count - 1}
    for start, stop in _stretches(count, max(1, at_most // 2 - 1)):
        inside = numbers[start:stop]
        finite = np.flatnonzero(np.isfinite(inside))
        if len(finite):
            kept |= {
                start + finite[inside[finite].argmin()],
                start + finite[inside[finite].argmax()],
            }
        else:
            kept.add(start)
    order = sorted(kept)
    return at[order].tolist(), numbers[order].tolist()


def _stretches(count: int, amount: int) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(i * count // amount for i in range(amount + 1))
