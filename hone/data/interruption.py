"""Ends a Python call in this thread that computes for too long, such as an endless loop.

One thread of the process looks at the running calls four times a second and raises an exception in
the thread of a call that is overdue. Leaves out a call into C that never returns to Python.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
INTERVAL_S = 0.25
ARRIVAL_S = 0.1
"""How long to wait for an interrupt that was sent: it arrives with the next line of Python."""


class Overdue(Exception):
    """The call computed for longer than it may."""


class _Interrupt(BaseException):
    """Raised in the thread of an overdue call; no Exception, so that the call cannot catch it."""


def limited(call: Callable[[], T], seconds: float) -> T:
    """What the call returns or raises; Overdue after `seconds` of computing (not of waiting)."""
    thread = threading.get_ident()
    arrived = False
    try:
        _watch.begin(thread, seconds)
        return call()
    except _Interrupt:
        arrived = True
        raise Overdue(f"not done after {seconds:g} s") from None
    finally:
        _let_arrive(thread, arrived)


def _let_arrive(thread: int, arrived: bool) -> None:
    """End the watch over a call; an interrupt that was sent and has not arrived does so in here.

    Python has no way to take one back: clearing it leaves its interpreter checking for ever.
    """
    sent = arrived
    while True:
        try:
            sent = _watch.end(thread) or sent
            until = time.monotonic() + ARRIVAL_S
            while sent and not arrived and time.monotonic() < until:
                pass
            return
        except _Interrupt:
            arrived = True


class _Watch:
    """The calls under way, by thread, and the thread that looks at them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}
        self._sent: set[int] = set()
        self._busy = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, thread: int, seconds: float) -> None:
        with self._lock:
            self._ends[thread] = _computing_s(thread) + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hone-watch", daemon=True)
                self._thread.start()
        self._busy.set()

    def end(self, thread: int) -> bool:
        """Send nothing more to a thread; whether it was sent an interrupt."""
        with self._lock:
            self._ends.pop(thread, None)
            was_sent = thread in self._sent
            self._sent.discard(thread)
        return was_sent

    def _run(self) -> None:
        while True:
            self._busy.wait()
            time.sleep(INTERVAL_S)
            with self._lock:
                for thread, end in self._ends.items():
                    if _computing_s(thread) > end:
                        _interrupt(thread)
                        self._sent.add(thread)
                if not self._ends:
                    self._busy.clear()


def _computing_s(thread: int) -> float:
    """Processor seconds of a thread; where the system does not tell, the time of day."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.clock_gettime(time.pthread_getcpuclockid(thread))
    return time.monotonic()


def _interrupt(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_Interrupt))


_watch = _Watch()


def _after_fork() -> None:
    global _watch
    _watch = _Watch()


os.register_at_fork(after_in_child=_after_fork)
