"""Waiting for phases: how long one may take, and its progress for a listener.

A phase is a call that others wait for: a worker's method, all agent loops of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

Listener = Callable[[int, int], None]
"""Takes how many ranks have answered, and of how many."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Call `listener` about once per second of every wait inside."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def tell(answered: int, ranks: int) -> None:
    listener = _listener.get()
    if listener is not None:
        listener(answered, ranks)


@dataclass
class PhaseDeadlines:
    """Deadlines of phases by name: a floor, or a factor times the longest completed run."""

    floor_s: float
    """`trainer.phase_deadline_floor_s`."""
    factor: float
    """`trainer.phase_deadline_factor`."""
    longest_s: dict[str, float] = field(default_factory=dict)
    """The longest completed run of each phase."""

    def limit_s(self, phase: str) -> float:
        """How long the next run of the phase may take."""
        return max(self.floor_s, self.factor * self.longest_s.get(phase, 0.0))

    def record(self, phase: str, seconds: float) -> None:
        """Note a completed run; one that failed says nothing about the work."""
        self.longest_s[phase] = max(seconds, self.longest_s.get(phase, 0.0))

    @contextmanager
    def measured(self, phase: str) -> Iterator[float]:
        """Yields the limit of this run and records its time if it completes."""
        started = time.monotonic()
        yield self.limit_s(phase)
        self.record(phase, time.monotonic() - started)

    def advice(self, phase: str) -> str:
        """The origin of the limit and how to raise it: the end of an error message."""
        longest = self.longest_s.get(phase)
        if longest is None or self.factor * longest <= self.floor_s:
            return "raise trainer.phase_deadline_floor_s if the work is that long"
        return (
            f"raise trainer.phase_deadline_factor (the limit is {self.factor:g} times the "
            f"{longest:.3g} s that it took at most before) if the work is that long"
        )
