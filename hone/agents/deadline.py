"""Awaits user code (agent loops, tools, interactions) with a deadline.

User code that blocks the event loop cannot be interrupted from the same thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hone.event_loop import abandon_task, as_exception, raised_by_signal

T = TypeVar("T")

GRACE_S = 2.0
"""Default seconds that a cancelled task gets to clean up before it is abandoned."""


class DeadlineExceeded(Exception):
    """The deadline of `run_with_deadline` passed; a TimeoutError of the work itself stays one."""


async def run_with_deadline(
    work: Coroutine[None, None, T], seconds: float | None, *, grace_s: float | None = None
) -> T:
    """Returns the result of the work; raises DeadlineExceeded after `seconds` (None: no deadline).

    A SystemExit of the work becomes an Exception, because it would end the event loop.
    """
    task = asyncio.ensure_future(_convert_exits(work))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        try:
            if not task.done():
                await _cancel(task, GRACE_S if grace_s is None else grace_s)
        finally:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()  # cancelled before its first step
    if not done:
        raise DeadlineExceeded(f"not done after {seconds:g} s")
    if task.cancelled():  # by the work itself: a cancellation of this function was raised above
        raise RuntimeError("it cancelled itself (asyncio.CancelledError)")
    return task.result()


async def _convert_exits(work: Coroutine[None, None, T]) -> T:
    """Awaits the work; turns a SystemExit into a RuntimeError, but not a Ctrl-C."""
    try:
        return await work
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        # Closing this coroutine from outside raises GeneratorExit here, not in the work.
        is_closing = isinstance(error, GeneratorExit) and _raised_by_caller(error)
        if is_closing or raised_by_signal(error):
            raise
        exception = as_exception(error)
        if exception is error:
            raise
        raise exception from error


def _raised_by_caller(error: BaseException) -> bool:
    """Returns whether the function that caught the error also raised it."""
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


async def _cancel(task: asyncio.Future[T], grace_s: float) -> None:
    """Cancels a task; abandons it after `grace_s`, or closing the event loop would wait for it."""
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=grace_s)
    finally:  # this wait may itself be cancelled
        if not task.done():
            abandon_task(task)
        elif not task.cancelled():
            task.exception()  # otherwise asyncio logs that the exception was never retrieved


async def run_in_thread(function: Callable[..., T], **arguments: Any) -> T:
    """Calls a blocking function in a daemon thread that is not joined at exit.

    asyncio.to_thread is not used, because closing its event loop waits for every thread it started.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def resolve(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def run() -> None:
        setter: Callable[[Any], None] = future.set_result
        value: Any
        try:
            value = function(**arguments)
        except BaseException as error:
            setter, value = future.set_exception, as_exception(error)
        with contextlib.suppress(RuntimeError):  # the event loop is already closed
            loop.call_soon_threadsafe(resolve, setter, value)

    threading.Thread(target=run, name="hone-tool", daemon=True).start()
    return await future
