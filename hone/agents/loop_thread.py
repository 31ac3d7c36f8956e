"""Runs agent loops in the event loop of a separate thread, while the engine decodes.

A `DrivenEngine` decodes in the caller's thread, and after each completion waits for the loops' next
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
from hone.rollout.contract import DrivenEngine, RolloutEngine, RolloutError

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)

_SUBMIT_ITERATIONS = 16
"""Event-loop iterations (a few µs each) in which agent loops can submit their next requests.

An agent loop needs 9 iterations to call a tool and submit the next request."""
_SUBMIT_TIMEOUT_S = 5.0
"""If an agent loop blocks the event loop for longer, decoding continues without that loop's request."""
_POLL_S = 0.001
"""Interval at which `wait_for_requests` checks whether the event loop has ended."""
LOOPS_GRACE_S = 30.0
"""Seconds that agent loops get to end after decoding stops, and again after cancellation."""


def run_with_engine(engine: RolloutEngine, work: Coroutine[None, None, T]) -> T:
    """Runs `work` and returns its result; a `DrivenEngine` decodes in this thread meanwhile."""
    if not isinstance(engine, DrivenEngine):
        return run_coroutine(work)
    loop_thread = LoopThread(work, engine.notify)
    loop_thread.start()

    def should_stop() -> bool:
        loop_thread.wait_for_requests()
        return loop_thread.outcome.done()

    try:
        engine.drive(should_stop)
        loop_thread.end_after_decoding()
    except BaseException:  # e.g. Ctrl-C: end the loops first, so that tools are released
        loop_thread.cancel()
        loop_thread.wait(LOOPS_GRACE_S)
        raise
    return loop_thread.outcome.result()


class LoopThread(Generic[T]):
    """Runs one coroutine, and the tasks that it starts, in an event loop in a separate thread."""

    def __init__(self, work: Coroutine[None, None, T], on_end: Callable[[], None]) -> None:
        self.outcome: Future[T] = Future()
        self._event_loop_run = EventLoopRun(work)
        self._on_end = on_end
        self._requests_submitted = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="hone-loops", daemon=True).start()

    def _run(self) -> None:
        try:
            self.outcome.set_result(self._event_loop_run.run())
        except BaseException as error:
            self.outcome.set_exception(error)
        self._requests_submitted.set()
        self._on_end()

    def call_soon(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> bool:
        return self._event_loop_run.call_soon(call, *args, **kwargs)

    def wait_for_requests(self) -> None:
        """Waits until loops that got a completion have submitted their next requests."""
        self._requests_submitted = submitted = threading.Event()
        if not self.call_soon(_set_after_iterations, _SUBMIT_ITERATIONS, submitted):
            return
        polls = round(_SUBMIT_TIMEOUT_S / _POLL_S)
        if not any(submitted.wait(_POLL_S) or self.outcome.done() for _ in range(polls)):
            log.warning(
                "an agent loop has blocked its event loop for %.0f s; decoding goes on without it",
                _SUBMIT_TIMEOUT_S,
            )

    def cancel(self) -> None:
        self._event_loop_run.cancel()

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` for the loops, and returns whether they have ended."""
        return bool(wait([self.outcome], timeout=seconds).done)

    def end_after_decoding(self) -> None:
        """Waits for the loops after the last completion, and cancels loops that do not end."""
        if self.wait(LOOPS_GRACE_S):
            return
        self.cancel()
        if not self.wait(LOOPS_GRACE_S):
            raise RolloutError("decoding has stopped, but the agent loops did not end")


def _set_after_iterations(iterations: int, event: threading.Event) -> None:
    """Sets the event after this number of iterations of the running event loop."""
    if iterations == 0:
        event.set()
    else:
        asyncio.get_running_loop().call_soon(_set_after_iterations, iterations - 1, event)
