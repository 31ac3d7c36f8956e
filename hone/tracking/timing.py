"""Timers: where the seconds of a step go, as `timing_s/<name>`, in wall time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

PREFIX = "timing_s/"


class Timers:
    """Named stopwatches: `with timers.timer("gen"): ...`, then `timers.drain()` once per step."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Add the time inside to `name`, also when it ends in an exception."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that another process measured."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        return {PREFIX + name: seconds for name, seconds in self._seconds.items()}

    def drain(self) -> dict[str, float]:
        """The metrics so far; the timers start from zero again."""
        metrics = self.metrics()
        self._seconds.clear()
        return metrics
