"""Deadlines of phases, and progress reports while the caller waits.

A phase is a worker's method, or all agent loops of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

Listener = Callable[[int, int], None]
"""Receives the number of ranks that have answered and the number of all ranks."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def on_wait_progress(listener: Listener) -> Iterator[None]:
    """Calls `listener` about once per second while the caller waits for ranks inside the block."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def report_progress(answered_ranks: int, total_ranks: int) -> None:
    """Calls the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(answered_ranks, total_ranks)


@dataclass
class PhaseDeadlines:
    """A phase's deadline: the larger of `floor_s` and `factor` times its longest completed run."""

    floor_s: float
    """`trainer.phase_deadline_floor_s`."""
    factor: float
    """`trainer.phase_deadline_factor`."""
    longest_run_s: dict[str, float] = field(default_factory=dict)
    """The longest completed run of each phase."""

    def limit_s(self, phase: str) -> float:
        """Returns the deadline of the phase's next run."""
        return max(self.floor_s, self.factor * self.longest_run_s.get(phase, 0.0))

    def record(self, phase: str, seconds: float) -> None:
        """Records the duration of a completed run."""
        self.longest_run_s[phase] = max(seconds, self.longest_run_s.get(phase, 0.0))

    @contextmanager
    def timed(self, phase: str) -> Iterator[float]:
        """Yields the limit of this run and records its duration if it completes."""
        start_time = time.monotonic()
        yield self.limit_s(phase)
        self.record(phase, time.monotonic() - start_time)

    def advice(self, phase: str) -> str:
        """Returns the end of an error message: where the limit comes from and how to raise it."""
        longest_run_s = self.longest_run_s.get(phase)
        if longest_run_s is None or self.factor * longest_run_s <= self.floor_s:
            return "raise trainer.phase_deadline_floor_s if the work is that long"
        return (
            f"raise trainer.phase_deadline_factor (the limit is {self.factor:g} times the longest "
            f"run so far, {longest_run_s:.3g} s) if the work is that long"
        )
