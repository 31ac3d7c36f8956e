"""Runs agent loops in an event loop in a separate thread, while the engine decodes.

A `Driven` engine decodes in the thread that waits for the loops. After it has answered requests, it
waits until the loops have submitted their next ones. So the batches, and with them the last bits of every
result, do not depend on thread timing, unless a loop waits for an external service.
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
"""Event-loop iterations (a few µs each) for loops to submit requests; a tool call takes nine."""
_SETTLE_TIMEOUT_S = 5.0
"""If an agent loop blocks the event loop for longer, decoding continues without it."""
_LOOK_S = 0.001
"""Poll interval while the loops settle: the event loop may have ended."""
LOOPS_GRACE_S = 30.0
"""Seconds that agent loops may take to end after decoding stops, and again after cancellation."""


def run_beside(engine: RolloutEngine, work: Coroutine[None, None, T]) -> T:
    """Returns the result of the work; a `Driven` engine decodes in this thread until the work ends."""
    if not isinstance(engine, Driven):
        return run_coroutine(work)
    loops = LoopThread(work, engine.notify)
    loops.start()

    def until() -> bool:
        loops.settle()
        return loops.outcome.done()

    try:
        engine.drive(until)
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
        """Lets loops that got an answer submit their next requests."""
        self._settled = settled = threading.Event()
        if not self.call_soon(_after_hops, _SETTLE_HOPS, settled):
            return
        looks = round(_SETTLE_TIMEOUT_S / _LOOK_S)
        if not any(settled.wait(_LOOK_S) or self.outcome.done() for _ in range(looks)):
            log.warning(
                "an agent loop has blocked its event loop for %.0f s; decoding goes on without it",
                _SETTLE_TIMEOUT_S,
            )

    def cancel(self) -> None:
        self._running.cancel()

    def wait(self, seconds: float) -> bool:
        """Returns whether the loops ended in time."""
        return bool(wait([self.outcome], timeout=seconds).done)

    def end_after_decoding(self) -> None:
        """Cancels loops that do not end although every request has been answered."""
        if self.wait(LOOPS_GRACE_S):
            return
        self.cancel()
        if not self.wait(LOOPS_GRACE_S):
            raise RolloutError("decoding has stopped, but the agent loops that asked did not end")


def _after_hops(hops: int, settled: threading.Event) -> None:
    if hops == 0:
        settled.set()
    else:
        asyncio.get_running_loop().call_soon(_after_hops, hops - 1, settled)
