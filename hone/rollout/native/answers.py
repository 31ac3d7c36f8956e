"""Answers on their way from the decoding thread to the event loops that wait for them."""

from __future__ import annotations

import asyncio
import logging

from hone.event_loop import call_in
from hone.rollout.contract import RolloutError
from hone.rollout.requests import Request, decoding_failed

log = logging.getLogger(__name__)


def answer(requests: list[Request]) -> list[Request]:
    """Hand answers to their loops; returns those whose loop has closed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Request]] = {}
    for request in requests:
        by_loop.setdefault(request.owner.get_loop(), []).append(request)
    return [
        request
        for loop, answered in by_loop.items()
        if not call_in(loop, resolve, answered)
        for request in answered
    ]


def resolve(requests: list[Request]) -> None:
    for request in requests:
        future = request.owner
        stream(request)
        if future.done():
            continue
        try:
            future.set_result(request.output())
        except Exception as error:  # this request's alone: the others have their answers
            future.set_exception(decoding_failed(error))


def stream(request: Request) -> None:
    """New tokens to the caller; an error of its own ends its request alone."""
    future = request.owner
    if future.done():
        return
    try:
        request.stream()
    except Exception as error:
        request.cancelled = True
        future.set_exception(error)


def refuse(request: Request, error: RolloutError) -> None:
    future = request.owner

    def fail() -> None:
        if not future.done():
            own = RolloutError(*error.args)  # raised in many places: each has its own traceback
            own.__cause__ = error.__cause__
            future.set_exception(own)

    if not call_in(future.get_loop(), fail):
        log.warning("request %s failed after its loop closed: %s", request.request_id, error)
