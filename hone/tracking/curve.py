"""Draws learning curves as PNG: one panel per metric, one colour per run, raw and smoothed."""

from __future__ import annotations

import difflib
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hone.tracking.atomic import atomic_path
from hone.tracking.metrics_file import read_metrics, series
from hone.tracking.run_folder import unique_labels

PathLike = str | os.PathLike[str]
DEFAULT_SMOOTHING = 0.6
MAX_UNSMOOTHED_POINTS = 12
"""Curves with at most this many points are drawn unsmoothed, with markers."""
HELD_OUT_PREFIXES = ("val-core/", "val-aux/", "val/")
"""Prefixes of held-out metrics, which are never smoothed."""

Steps = Sequence[int] | NDArray[np.int64]
Values = Sequence[float] | NDArray[np.float64]


def draw_curve(
    metrics_path: PathLike | Sequence[PathLike] | Mapping[str, PathLike],
    keys: Sequence[str],
    out_png: PathLike,
    title: str,
    *,
    smoothing: float = DEFAULT_SMOOTHING,
) -> Path:
    """Draws metrics of `metrics.jsonl` files or run folders; the keys of a mapping label the runs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if isinstance(metrics_path, str | os.PathLike):
        metrics_path = [metrics_path]
    if not isinstance(metrics_path, Mapping):
        metrics_path = dict(zip(unique_labels(metrics_path), metrics_path, strict=True))
    runs = {label: read_metrics(path) for label, path in metrics_path.items()}
    metric_names = sorted({key for rows in runs.values() for row in rows for key in row})
    for key in keys:
        if key not in metric_names:
            similar = difflib.get_close_matches(key, metric_names, n=3) or metric_names[:20]
            hint = f"similar: {', '.join(similar)}" if similar else "the runs have no metrics"
            raise ValueError(f"no run has the metric {key!r}; {hint}")
    # An explicit canvas, unlike pyplot, needs no display and leaves no global state.
    figure = Figure(figsize=(7.0, 1.0 + 2.6 * len(keys)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(keys), 1, squeeze=False, sharex=True)[:, 0]
    for panel, key in zip(panels, keys, strict=True):
        for index, (label, rows) in enumerate(runs.items()):
            steps, values = series(rows, key)
            style = {"color": f"C{index}", "label": label}
            if steps and is_unsmoothed(key, len(steps)):
                panel.plot(steps, values, **style, marker="o", markersize=3.5)
            elif steps:
                panel.plot(steps, values, color=f"C{index}", alpha=0.25, linewidth=0.8)
                panel.plot(steps, smooth(values, smoothing), **style, linewidth=1.8)
        panel.set_ylabel(key)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("step")
    if len(runs) > 1:
        panels[0].legend(frameon=False)
    figure.suptitle(title)
    with atomic_path(out_png) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return Path(out_png)


def is_unsmoothed(key: str, num_points: int) -> bool:
    """Whether a curve is drawn without smoothing."""
    return num_points <= MAX_UNSMOOTHED_POINTS or key.startswith(HELD_OUT_PREFIXES)


def smooth(values: Sequence[float], weight: float) -> list[float]:
    """Returns the bias-corrected exponential moving average; non-finite values stay unchanged."""
    if not 0 <= weight < 1:
        raise ValueError(f"smoothing weight must be in [0, 1), got {weight}")
    smoothed: list[float] = []
    weighted_sum = weight_sum = 0.0
    for value in values:
        if math.isfinite(value):
            weighted_sum = weight * weighted_sum + (1 - weight) * value
            weight_sum = weight * weight_sum + (1 - weight)
            value = weighted_sum / weight_sum
        smoothed.append(value)
    return smoothed


class BucketMeans(NamedTuple):
    """A bucketed curve: the middle step, the mean and the number of values per bucket."""

    steps: list[int]
    values: list[float]
    counts: list[int]


def bucket_means(steps: Steps, values: Values, num_buckets: int) -> BucketMeans:
    """Averages the finite values of each bucket; the mean of a bucket without any is NaN."""
    value_array = np.asarray(values, np.float64)
    means = BucketMeans([], [], [])
    for start, stop in _bucket_bounds(len(value_array), num_buckets):
        bucket = value_array[start:stop]
        finite_values = bucket[np.isfinite(bucket)]
        means.steps.append(int(steps[(start + stop) // 2]))
        means.values.append(float(finite_values.mean()) if len(finite_values) else math.nan)
        means.counts.append(len(finite_values))
    return means


def envelope(steps: Steps, values: Values, num_buckets: int) -> tuple[list[int], list[float]]:
    """Returns the first point, the last point and the extremes of each bucket, so that peaks remain."""
    value_array, step_array = np.asarray(values, np.float64), np.asarray(steps)
    indices = {0, len(value_array) - 1}
    for start, stop in _bucket_bounds(len(value_array), num_buckets):
        bucket = value_array[start:stop]
        finite_indices = np.flatnonzero(np.isfinite(bucket))
        finite_values = bucket[finite_indices]
        extremes = (finite_values.argmin(), finite_values.argmax()) if len(finite_values) else ()
        indices |= {start + finite_indices[i] for i in extremes} or {start}
    sorted_indices = sorted(indices)
    return step_array[sorted_indices].tolist(), value_array[sorted_indices].tolist()


def _bucket_bounds(num_values: int, num_buckets: int) -> Iterator[tuple[int, int]]:
    return itertools.pairwise(i * num_values // num_buckets for i in range(num_buckets + 1))
