from __future__ import annotations

import pytest

from hone.tracking import Timers


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_timer_becomes_a_metric() -> None:
    clock = Clock()
    timers = Timers(clock)
    with timers.timer("gen"):
        clock.now += 2.5
    assert timers.drain() == {"timing_s/gen": 2.5}


def test_a_repeated_timer_adds_up_and_timers_nest() -> None:
    clock = Clock()
    timers = Timers(clock)
    with timers.timer("step"):
        for seconds in (1.0, 2.0):
            with timers.timer("gen"):
                clock.now += seconds
        clock.now += 4.0
    assert timers.drain() == {"timing_s/gen": 3.0, "timing_s/step": 7.0}


def test_time_before_an_exception_counts() -> None:
    clock = Clock()
    timers = Timers(clock)

    def fail() -> None:
        with timers.timer("gen"):
            clock.now += 1.0
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert timers.drain() == {"timing_s/gen": 1.0}


def test_draining_starts_from_zero() -> None:
    clock = Clock()
    timers = Timers(clock)
    with timers.timer("gen"):
        clock.now += 1.0
    assert timers.drain() == {"timing_s/gen": 1.0}
    assert timers.drain() == {}
