"""A soft deadline for a call in this process; Python cannot kill a running function.

In the main thread, a timer signal interrupts the call. In other threads, the call runs in a helper
thread, which is abandoned at the deadline. The prime manager's processes have a hard deadline.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class DeadlineExceeded(BaseException):
    """Raised at the deadline; a scorer's `except Exception` does not catch a BaseException."""


def call_with_deadline(function: Callable[[], T], timeout_s: float) -> T:
    """Returns `function()`, or raises DeadlineExceeded after `timeout_s` seconds."""
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        return _call_with_timer(function, timeout_s)
    future: Future[T] = Future()

    def run_function() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # `future.result()` raises it in the caller's thread
            future.set_exception(error)

    thread = threading.Thread(target=run_function, name="hone-score", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise DeadlineExceeded
    return future.result()


def _call_with_timer(function: Callable[[], T], timeout_s: float) -> T:
    def on_timer(signal_number: int, frame: FrameType | None) -> None:
        raise DeadlineExceeded

    outer_handler = signal.signal(signal.SIGALRM, on_timer)
    # The timer repeats, because a bare `except` in a scorer may catch the first signal.
    outer_remaining_s, outer_interval_s = signal.setitimer(
        signal.ITIMER_REAL, timeout_s, max(timeout_s, 1.0)
    )
    start_s = time.monotonic()
    try:
        try:
            return function()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:  # again, because the signal may have interrupted the first `finally`
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, outer_handler)
        if outer_remaining_s:
            outer_remaining_s = max(outer_remaining_s - (time.monotonic() - start_s), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, outer_remaining_s, outer_interval_s)
