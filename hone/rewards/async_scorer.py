"""Calls async scorers, each call with a deadline, so that many rows are scored concurrently."""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from typing import Any

from hone.plugins import unwrap_function
from hone.rewards.failures import Failed, Scored
from hone.rewards.scorer import (
    ScorerInput,
    accepted_arguments,
    counted_mishaps,
    failure_of,
    read_result,
)
from hone.types import Function, Settings


def is_async(function: Function) -> bool:
    """Returns whether a call of the function or callable object returns a coroutine."""
    unwrapped = unwrap_function(function)
    call = getattr(type(unwrapped), "__call__", None)  # noqa: B004
    return any(map(inspect.iscoroutinefunction, (function, unwrapped, call)))


async def await_row(
    function: Function, row: ScorerInput, options: Settings, timeout_s: float | None
) -> Scored | Failed:
    """Scores one row with an async scorer; `timeout_s` does not apply to a scorer with `has_own_deadline`."""
    unwrapped = unwrap_function(function)
    if getattr(function, "has_own_deadline", getattr(unwrapped, "has_own_deadline", False)):
        timeout_s = None
    try:
        with counted_mishaps() as mishaps:
            arguments = accepted_arguments(function, row.arguments(), options)
            call = asyncio.ensure_future(await_scorer(function, arguments))
            done, _ = await asyncio.wait({call}, timeout=timeout_s)
        if not done:
            call.cancel()  # not awaited, because the call may ignore the cancellation
            return Failed("timeout", f"no score after {timeout_s:g} s")
        if call.cancelled():
            raise RuntimeError("the call cancelled itself (asyncio.CancelledError)")
        return read_result(call.result(), mishaps)
    except (Exception, SystemExit) as error:  # a user's scorer may raise anything
        return failure_of(error, function, options)


async def await_scorer(function: Function, arguments: Settings) -> Any:
    """Calls a scorer and awaits its result if it is a coroutine.

    A synchronous function is called in a thread, because it may block, or run an event loop of its own.
    """
    call = function
    while isinstance(call, partial):
        call = call.func
    methods = call, getattr(type(call), "__call__", None)  # noqa: B004
    if any(map(inspect.iscoroutinefunction, methods)):
        return await function(**arguments)
    result = await asyncio.to_thread(function, **arguments)
    return await result if inspect.isawaitable(result) else result
