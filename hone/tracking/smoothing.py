"""Smoothing and thinning of a curve before it is drawn; the numbers on disk stay as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

DEFAULT_WEIGHT = 0.6
FEW_POINTS = 12
"""Curves this short (validations) are drawn as they are, with their points marked."""


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Exponential moving average without the pull towards zero at the start.

    Point i is the average of points 0..i, each step back counting `weight` times less; weight 0
    leaves the curve as it is. A value that is not finite is passed on and otherwise left out.
    """
    if not 0 <= weight < 1:
        raise ValueError(f"smoothing weight must be in [0, 1), got {weight}")
    smoothed: list[float] = []
    total = mass = 0.0
    for value in values:
        if not math.isfinite(value):
            smoothed.append(value)
            continue
        total = weight * total + (1 - weight) * value
        mass = weight * mass + (1 - weight)
        smoothed.append(total / mass)
    return smoothed


def thin(
    steps: Sequence[int], values: Sequence[float], at_most: int
) -> tuple[list[int], list[float]]:
    """At most about `at_most` of the points, keeping each stretch's lowest and highest.

    Peaks and dips survive, unlike with every n-th point; the first and last point always do.
    """
    count = len(steps)
    if count <= at_most:
        return list(steps), list(values)
    stretches = max(1, at_most // 2 - 1)
    kept = {0, count - 1}
    for stretch in range(stretches):
        inside = range(stretch * count // stretches, (stretch + 1) * count // stretches)
        finite = [i for i in inside if math.isfinite(values[i])] or list(inside)
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    order = sorted(kept)
    return [steps[i] for i in order], [values[i] for i in order]
