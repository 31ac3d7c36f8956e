"""Runs coroutines that await an engine, such as agent loops, while the engine decodes.

A `DrivenEngine` decodes in the caller's thread. After each completion, the engine waits for the next
requests of the coroutines. Batches then depend on timing only if a coroutine awaits an external service.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TypeVar

from hone.event_loop import LoopThread, run_coroutine
from hone.rollout.contract import RolloutEngine, RolloutError, is_driven

T = TypeVar("T")

LOOPS_GRACE_S = 30.0
"""Seconds that agent loops get to end after decoding stops, and again after cancellation."""


def run_with_engine(engine: RolloutEngine, coroutine: Coroutine[None, None, T]) -> T:
    """Runs a coroutine and returns its result; a `DrivenEngine` decodes in this thread meanwhile."""
    if not is_driven(engine):
        return run_coroutine(coroutine)
    loop_thread = LoopThread(coroutine, engine.notify)
    loop_thread.start()

    def should_stop() -> bool:
        loop_thread.wait_for_requests()
        return loop_thread.outcome.done()

    try:
        engine.drive(should_stop)
        if not loop_thread.wait(LOOPS_GRACE_S):
            raise RolloutError("decoding has stopped, but the agent loops did not end")
    except BaseException:  # for example Ctrl-C: the loops must release their tools
        loop_thread.cancel()
        loop_thread.wait(LOOPS_GRACE_S)
        raise
    return loop_thread.outcome.result()
