"""How long a phase may take: a floor, or a factor times the longest that it took before.

A phase is a call that others wait for: a worker's method, all agent loops of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class PhaseDeadlines:
    """Deadlines of phases by name, from the time that each of them took so far."""

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
        """Take note of a completed run; one that failed says nothing about the work."""
        self.longest_s[phase] = max(seconds, self.longest_s.get(phase, 0.0))

    @contextmanager
    def measured(self, phase: str) -> Iterator[float]:
        """Gives the limit of this run and records its time if it completes."""
        started = time.monotonic()
        yield self.limit_s(phase)
        self.record(phase, time.monotonic() - started)

    def advice(self, phase: str) -> str:
        """Where the limit comes from and how it is raised: the end of an error message."""
        longest = self.longest_s.get(phase)
        if longest is None or self.factor * longest <= self.floor_s:
            return "raise trainer.phase_deadline_floor_s if the work is that long"
        return (
            f"raise trainer.phase_deadline_factor (the limit is {self.factor:g} times the "
            f"{longest:.3g} s that it took at most before) if the work is that long"
        )
