from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hone.rewards.deadline import DeadlineExceeded, call_with_deadline


def in_main_thread(call: Callable[[], Any]) -> Any:
    return call()


def in_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


in_both_threads = pytest.mark.parametrize("run_in", [in_main_thread, in_thread])


@in_both_threads
def test_a_call_in_time_returns_its_value(run_in: Callable[[Callable[[], Any]], Any]) -> None:
    assert run_in(lambda: call_with_deadline(lambda: 7, 30)) == 7


@in_both_threads
def test_a_late_call_raises_deadline_exceeded(run_in: Callable[[Callable[[], Any]], Any]) -> None:
    with pytest.raises(DeadlineExceeded):
        run_in(lambda: call_with_deadline(lambda: time.sleep(30), 0.1))


@in_both_threads
def test_an_error_of_the_call_is_raised_unchanged(
    run_in: Callable[[Callable[[], Any]], Any],
) -> None:
    with pytest.raises(ZeroDivisionError):
        run_in(lambda: call_with_deadline(lambda: 1 / 0, 30))


def test_a_call_that_swallows_exceptions_is_still_interrupted() -> None:
    def stubborn() -> None:
        while True:
            try:
                time.sleep(30)
            except Exception:
                continue

    with pytest.raises(DeadlineExceeded):
        call_with_deadline(stubborn, 0.1)


def test_handler_and_timer_are_restored() -> None:
    handler = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        call_with_deadline(lambda: None, 30)
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_a_signal_that_comes_as_the_call_ends_leaves_no_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler, setitimer = signal.getsignal(signal.SIGALRM), signal.setitimer
    signals = [DeadlineExceeded()]

    def interrupted(timer: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        if seconds == 0 and signals:
            raise signals.pop()
        return setitimer(timer, seconds, interval)

    monkeypatch.setattr(signal, "setitimer", interrupted)
    with pytest.raises(DeadlineExceeded):
        call_with_deadline(lambda: None, 30_000)
    assert signal.getitimer(signal.ITIMER_REAL)[0] < 20_000  # that of the tests, if any
    assert signal.getsignal(signal.SIGALRM) is handler
