"""Waiting for code of the user's own: with a deadline, and without its cancellations reaching us.

Loops, tools and interactions are all waited for here. Leaves out code that blocks the event loop: nothing
in this thread can end that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from asyncio.tasks import _unregister_task
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""How long something cancelled may take to clean up, unless said otherwise; then it is left behind."""


class Overdue(Exception):
    """The deadline passed: ours, not a TimeoutError of the work itself."""


async def bounded(
    work: Coroutine[Any, Any, T], seconds: float | None, *, grace_s: float | None = None
) -> T:
    """What the work returns or raises; Overdue after `seconds` (None is no deadline)."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            await _end(task, GRACE_S if grace_s is None else grace_s)
    if not done:
        raise Overdue(f"not done after {seconds:g} s")
    if task.cancelled():  # not by us: a cancellation of this wait has left above
        raise RuntimeError("it cancelled itself (asyncio.CancelledError)")
    return task.result()


async def _end(task: asyncio.Future[Any], grace_s: float) -> None:
    """Cancel; what will not end is forgotten, or closing the event loop would wait for it."""
    task.cancel()
    await asyncio.wait({task}, timeout=grace_s)
    if not task.done():
        logger.warning("%r goes on after it was cancelled; it is left behind", task)
        assert isinstance(task, asyncio.Task)
        _unregister_task(task)
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
            # An exit would end the event loop, and a future cannot hold a StopIteration.
            plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            settle = answer.set_exception
            what = error if plain else RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, settle, what)

    threading.Thread(target=run, name="hone-tool", daemon=True).start()
    return await answer
