"""Runs agent loops in the event loop of a separate thread, while the engine decodes.

A `Driven` engine decodes in the caller's thread, and after each answer waits for the loops' next
requests, so that batches do not depend on thread timing unless a loop awaits an external service.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Generic, ParamSpec, TypeVar

from hone.event_loop import EventLoopRun, run_coroutine
from hone.rollout.contract import Driven, RolloutEngine, RolloutError

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)

_SETTLE_HOPS = 16
"""Event-loop iterations (a few µs each) in which loops submit requests; a tool call takes nine."""
_SETTLE_TIMEOUT_S = 5.0
"""If an agent loop blocks the event loop for longer, decoding continues without it."""
_POLL_S = 0.001
"""Interval at which `settle` checks whether the event loop has ended."""
LOOPS_GRACE_S = 30.0
"""Seconds that agent loops get to end after decoding stops, and again after cancellation."""


def run_beside(engine: RolloutEngine, work: Coroutine[None, None, T]) -> T:
    """Returns the result of the work; a `Driven` engine decodes in this thread until then."""
    if not isinstance(engine, Driven):
        return run_coroutine(work)
    loops = LoopThread(work, engine.notify)
    loops.start()

    def is_done() -> bool:
        loops.settle()
        return loops.outcome.done()

    try:
        engine.drive(is_done)
        loops.end_after_decoding()
    except BaseException:  # e.g. Ctrl-C: end the loops first, so that tools are released
        loops.cancel()
        loops.wait(LOOPS_GRACE_S)
        raise
    return loops.outcome.result()


class LoopThread(Generic[T]):
    """Runs one coroutine, and the tasks that it starts, in an event loop in a separate thread."""

    def __init__(self, work: Coroutine[None, None, T], on_end: Callable[[], None]) -> None:
        self.outcome: Future[T] = Future()
        self._running = EventLoopRun(work)
        self._on_end = on_end
        self._settled = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="hone-loops", daemon=True).start()

    def _run(self) -> None:
        try:
            self.outcome.set_result(self._running.run())
        except BaseException as error:
            self.outcome.set_exception(error)
        self._settled.set()
        self._on_end()

    def call_soon(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> bool:
        return self._running.call_soon(call, *args, **kwargs)

    def settle(self) -> None:
        """Waits until loops that got an answer have submitted their next requests."""
        self._settled = settled = threading.Event()
        if not self.call_soon(_after_hops, _SETTLE_HOPS, settled):
            return
        polls = round(_SETTLE_TIMEOUT_S / _POLL_S)
        if not any(settled.wait(_POLL_S) or self.outcome.done() for _ in range(polls)):
            log.warning(
                "an agent loop has blocked its event loop for %.0f s; decoding continues without",
                _SETTLE_TIMEOUT_S,
            )

    def cancel(self) -> None:
        self._running.cancel()

    def wait(self, seconds: float) -> bool:
        """Returns whether the loops ended in time."""
        return bool(wait([self.outcome], timeout=seconds).done)

    def end_after_decoding(self) -> None:
        """Waits for the loops after the last answer, and cancels loops that do not end."""
        if self.wait(LOOPS_GRACE_S):
            return
        self.cancel()
        if not self.wait(LOOPS_GRACE_S):
            raise RolloutError("decoding has stopped, but the agent loops did not end")


def _after_hops(hops: int, settled: threading.Event) -> None:
    if hops == 0:
        settled.set()
    else:
        asyncio.get_running_loop().call_soon(_after_hops, hops - 1, settled)
