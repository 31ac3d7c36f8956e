"""Awaits user code with a deadline, and contains the cancellations that it raises.

Loops, tools and interactions are all awaited here. User code that blocks the event loop is not
interrupted: nothing in the same thread can do that.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hone.event_loop import as_exception, forget_task, raised_by_signal

T = TypeVar("T")

GRACE_S = 2.0
"""Default seconds that a cancelled task gets to clean up before it is abandoned."""


class Overdue(Exception):
    """Our deadline passed, as opposed to a TimeoutError raised by the work itself."""


async def bounded(
    work: Coroutine[None, None, T], seconds: float | None, *, grace_s: float | None = None
) -> T:
    """Returns the result of the work; raises Overdue after `seconds` (None: no deadline).

    Whatever the work raises becomes an Exception, because a SystemExit would end the event loop.
    """
    task = asyncio.ensure_future(_contained(work))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        try:
            if not task.done():
                await _end(task, GRACE_S if grace_s is None else grace_s)
        finally:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()  # cancelled before its first step
    if not done:
        raise Overdue(f"not done after {seconds:g} s")
    if task.cancelled():  # by the work itself: a cancellation of this wait was raised above
        raise RuntimeError("it cancelled itself (asyncio.CancelledError)")
    return task.result()


async def _contained(work: Coroutine[None, None, T]) -> T:
    """Awaits the work; turns SystemExit into RuntimeError, and keeps the KeyboardInterrupt of a Ctrl-C."""
    try:
        return await work
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        # Closing this coroutine from outside raises GeneratorExit here, not in the work.
        closed = isinstance(error, GeneratorExit) and _raised_here(error)
        if closed or raised_by_signal(error):
            raise
        failure = as_exception(error)
        if failure is error:
            raise
        raise failure from error


def _raised_here(error: BaseException) -> bool:
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


async def _end(task: asyncio.Future[T], grace_s: float) -> None:
    """Cancels a task; one that does not end is abandoned, or closing the event loop would wait for it."""
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=grace_s)
    finally:  # also when this wait is cancelled
        if not task.done():
            forget_task(task)
        elif not task.cancelled():
            task.exception()  # otherwise asyncio logs that it was never retrieved


async def in_thread(function: Callable[..., T], **arguments: Any) -> T:
    """Calls a blocking function in a daemon thread that is not joined at exit.

    asyncio.to_thread is not used, because closing its event loop waits for every thread it started.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[[Any], None], what: Any) -> None:
        if not answer.done():
            settle(what)

    def run() -> None:
        settle: Callable[[Any], None] = answer.set_result
        what: Any
        try:
            what = function(**arguments)
        except BaseException as error:
            settle, what = answer.set_exception, as_exception(error)
        with contextlib.suppress(RuntimeError):  # the event loop is already closed
            loop.call_soon_threadsafe(tell, settle, what)

    threading.Thread(target=run, name="hone-tool", daemon=True).start()
    return await answer
