"""A soft deadline for a call in this process; Python cannot kill a running function.

In the main thread a timer signal interrupts the call. Elsewhere the call runs in a helper thread,
which is abandoned at the deadline. The prime manager's processes provide a hard deadline.
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

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # raised again in the caller's thread
            future.set_exception(error)

    thread = threading.Thread(target=work, name="hone-score", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise DeadlineExceeded
    return future.result()


def _call_with_timer(function: Callable[[], T], timeout_s: float) -> T:
    def on_timer(number: int, frame: FrameType | None) -> None:
        raise DeadlineExceeded

    handler = signal.signal(signal.SIGALRM, on_timer)
    # The timer repeats, because a bare `except` in a scorer may catch the first signal.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, timeout_s, max(timeout_s, 1.0))
    started = time.monotonic()
    try:
        return function()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            remaining = max(remaining - (time.monotonic() - started), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, remaining, interval)
