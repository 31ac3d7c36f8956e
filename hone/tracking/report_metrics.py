"""The metrics of a run as one pair of arrays a key: what the report's curves and tables are made of.

A line or a value that is no metric is left out and named in the notes; nothing here raises for it.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hone.tracking.metrics_file import STEP, MetricsFile
from hone.types import Row

HUGE = 1e300
"""Larger values are shown as infinite: their sums and differences would no longer be numbers."""
LARGEST_STEP = 2**62


class Series(NamedTuple):
    """The values of one key in order of steps; a step logged again counts once, the last."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def finite(self) -> Series:
        kept = np.isfinite(self.values)
        return Series(self.steps[kept], self.values[kept])


NOTHING = Series(np.empty(0, np.int64), np.empty(0))


@dataclass
class RunMetrics:
    """Every series of a run by key, and the first and last step that any line has."""

    series: dict[str, Series] = field(default_factory=dict)
    steps: tuple[int, int] | None = None
    notes: list[str] = field(default_factory=list)

    def of(self, key: str) -> Series:
        return self.series.get(key, NOTHING)


def load_metrics(file: Path) -> RunMetrics:
    """Read a `metrics.jsonl` line by line: a long run is never in memory as dictionaries."""
    torn: list[int] = []

    def rows() -> Iterator[Row]:
        for line_number, row in MetricsFile(file).lines():
            if row is None:
                torn.append(line_number)
            else:
                yield row

    metrics = metrics_of(rows())
    if torn:
        amount = f"{_lines(len(torn))}, the first being line {torn[0]}"
        metrics.notes.append(f"{file.name}: left out what is no metrics line ({amount})")
    return metrics


def metrics_of(rows: Iterable[Row]) -> RunMetrics:
    """The series of rows as `decode_line` gives them."""
    steps_of: dict[str, array[int]] = defaultdict(lambda: array("q"))
    values_of: dict[str, array[float]] = defaultdict(lambda: array("d"))
    refused: Counter[str] = Counter()
    metrics, far = RunMetrics(), 0
    for row in rows:
        step = row[STEP]
        if abs(step) > LARGEST_STEP:
            far += 1
            continue
        first, last = metrics.steps or (step, step)
        metrics.steps = min(first, step), max(last, step)
        for key, value in row.items():
            if key == STEP:
                continue
            try:
                values_of[key].append(value)
            except (TypeError, OverflowError):  # null, text, a list; an integer beyond floats
                refused[key] += 1
            else:
                steps_of[key].append(step)
    if far:
        metrics.notes.append(f"{_lines(far)} left out: the step is beyond ±2^62")
    for key in sorted(values_of):
        if refused[key]:
            metrics.notes.append(f"{key}: left out where it is no number ({_lines(refused[key])})")
        values, steps = values_of.pop(key), steps_of.pop(key, array("q"))
        if values:
            metrics.series[key] = _ordered(np.array(steps), np.array(values))
            _bound(key, metrics)
    return metrics


def _ordered(steps: NDArray[np.int64], values: NDArray[np.float64]) -> Series:
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    last = np.append(steps[1:] != steps[:-1], True)
    return Series(steps[last], values[last])


def _bound(key: str, metrics: RunMetrics) -> None:
    values = metrics.series[key].values
    huge = np.isfinite(values) & (np.abs(values) > HUGE)
    if huge.any():
        values[huge] = np.copysign(np.inf, values[huge])
        metrics.notes.append(
            f"{key}: not drawn where it is beyond ±{HUGE:.0e} ({_lines(int(huge.sum()))})"
        )


def _lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count:,} lines"
