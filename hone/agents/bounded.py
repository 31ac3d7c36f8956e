"""Waiting for code of the user's own: with a deadline, and without its cancellations reaching us.

Loops, tools and interactions are all waited for here. Leaves out code that blocks the event loop: nothing
in this thread can end that.
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
"""How long something cancelled may take to clean up, unless said otherwise; then it is left behind."""


class Overdue(Exception):
    """The deadline passed: ours, not a TimeoutError of the work itself."""


async def bounded(
    work: Coroutine[None, None, T], seconds: float | None, *, grace_s: float | None = None
) -> T:
    """What the work returns or raises; Overdue after `seconds` (None is no deadline).

    What it raises is an Exception, whatever it was: an exit of the work would end the event loop.
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
    if task.cancelled():  # not by us: a cancellation of this wait has left above
        raise RuntimeError("it cancelled itself (asyncio.CancelledError)")
    return task.result()


async def _contained(work: Coroutine[None, None, T]) -> T:
    """The work; an exit that it raises becomes a RuntimeError, a Ctrl-C of the user stays one."""
    try:
        return await work
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        # A coroutine that is closed from outside has GeneratorExit raised here, not in the work.
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
    """Cancel; what will not end is forgotten, or closing the event loop would wait for it."""
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=grace_s)
    finally:  # also where this wait is cancelled itself
        if not task.done():
            forget_task(task)
        elif not task.cancelled():
            task.exception()  # read, or asyncio logs that nobody did


async def in_thread(function: Callable[..., T], **arguments: Any) -> T:
    """Call a blocking function beside the event loop, in a thread that nobody waits for at the end.

    asyncio.to_thread would not do: closing its event loop waits for every thread it started.
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
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, settle, what)

    threading.Thread(target=run, name="hone-tool", daemon=True).start()
    return await answer
