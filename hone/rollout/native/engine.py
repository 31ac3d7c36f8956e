"""The native engine behind the contract: a thread that decodes, and futures that loops await.

Requests that loops make before anything can be answered go in as one batch, and after answers are
delivered the next step waits until the loops have asked again. So the batches, and with them the last
bits of every number, do not depend on thread timing (unless a loop truly waits for something outside).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling, TokenOutput
from hone.rollout.native.core import NativeCore
from hone.rollout.requests import Request, refuse_media
from hone.rollout.weights import load_weights

log = logging.getLogger(__name__)

_SETTLE_HOPS = 6
"""Turns of the event loop given to agent loops to ask again after answers arrive."""
_SETTLE_TIMEOUT_S = 5.0
"""If an agent loop blocks the event loop longer than this, decoding goes on without it."""
_CLOSE_TIMEOUT_S = 30.0


class NativeRollout:
    """A `RolloutEngine` over `NativeCore`; the decode thread starts with the first request."""

    def __init__(self, core: NativeCore) -> None:
        self._core = core
        self._outbox: list[Request] = []  # asked for in this turn of the event loop
        self._inbox: list[Request] = []  # on the way to the thread
        self._held: list[Request] = []  # asked for while aborted
        self._arrived = threading.Condition()  # guards inbox, held, paused, closed and failure
        self._door, self._room = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._paused = False
        self._closed = False
        self._failure: BaseException | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> TokenOutput:
        refuse_media(request_id, multi_modal_data, "native")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TokenOutput] = loop.create_future()
        request = Request(list(prompt_ids), sampling, request_id, owner=(loop, future))
        self._core.rules.check(request)
        if not self._outbox:
            loop.call_soon(self._flush)
        self._outbox.append(request)
        try:
            return await future
        finally:
            request.cancelled = future.cancelled()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._between_steps():
            load_weights(self._core.policy, weights)
            self._core.version = version

    def abort(self) -> None:
        with self._between_steps(), self._arrived:
            self._paused = True
            waiting, self._inbox = self._inbox, []
            for request in waiting:
                self._core.add(request)
            ended = self._core.abort()
        for loop, requests in _by_loop(ended).items():
            _call(loop, _resolve, loop, requests, threading.Event())

    def resume(self) -> None:
        with self._arrived:
            self._paused = False
            held, self._held = self._held, []
        if held:
            self._submit(held)

    def sleep(self) -> None:
        with self._between_steps():
            if self._core.busy:
                raise RolloutError("sleep was asked for while requests run; abort them first")
            self._core.cache.free()

    def wake_up(self) -> None:
        """Nothing to do: the cache allocates when the next prompt comes."""

    def close(self) -> None:
        """Stop the thread; whoever still waits is told so."""
        with self._arrived:
            self._closed = True
            self._arrived.notify()
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_TIMEOUT_S)
        self._fail(RolloutError("the engine was closed while this request waited"))

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the core while it does not decode; the decode thread lets callers in first."""
        with self._door, self._room:
            yield

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        self._submit(batch)

    def _submit(self, batch: list[Request]) -> None:
        with self._arrived:
            if self._closed or self._failure is not None:
                state = "is closed" if self._failure is None else "failed earlier"
                error = RolloutError(f"the rollout engine {state}; build another")
                error.__cause__ = self._failure
                for request in batch:
                    _refuse(request, error)
            elif self._paused:
                self._held += batch
            else:
                self._inbox += batch
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="hone-decode", daemon=True
                    )
                    self._thread.start()
                self._arrived.notify()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                with self._door:  # whoever wants the core between steps waits here
                    pass
                with self._room:
                    finished = self._step()
                self._deliver(finished)
        except BaseException as error:
            log.exception("the decode thread stopped")
            with self._arrived:
                self._failure = error
            self._fail(error)

    def _wait_for_work(self) -> bool:
        """Waits only when there is nothing to decode; False ends the thread."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._closed or self._inbox or self._core.busy)
            return not self._closed

    def _step(self) -> list[Request]:
        with self._arrived:
            arrived, self._inbox = self._inbox, []
        for request in arrived:
            self._core.add(request)
        return self._core.step() if self._core.busy else []

    def _deliver(self, finished: list[Request]) -> None:
        """Hand answers to their loops and give those loops the chance to ask again."""
        for loop, requests in _by_loop(finished).items():
            settled = threading.Event()
            open_loop = _call(loop, _resolve, loop, requests, settled)
            if open_loop and not settled.wait(_SETTLE_TIMEOUT_S):
                log.warning(
                    "an agent loop has blocked its event loop for %.0f s; decoding goes on without it",
                    _SETTLE_TIMEOUT_S,
                )

    def _fail(self, error: BaseException) -> None:
        """Everybody who waits hears of it."""
        with self._arrived:
            stranded = [*self._core.abort(), *self._inbox, *self._held]
            self._inbox, self._held = [], []
        for request in stranded:
            _refuse(request, error)


def _by_loop(requests: list[Request]) -> dict[asyncio.AbstractEventLoop, list[Request]]:
    by_loop: dict[asyncio.AbstractEventLoop, list[Request]] = {}
    for request in requests:
        by_loop.setdefault(request.owner[0], []).append(request)
    return by_loop


def _call(loop: asyncio.AbstractEventLoop, *call: Any) -> bool:
    """Run it in the loop; False when the loop has closed, and its owner no longer waits."""
    try:
        loop.call_soon_threadsafe(*call)
    except RuntimeError:
        return False
    return True


def _resolve(
    loop: asyncio.AbstractEventLoop, requests: list[Request], settled: threading.Event
) -> None:
    for request in requests:
        future = request.owner[1]
        if not future.done():
            future.set_result(request.output())
    _after_hops(loop, _SETTLE_HOPS, settled)


def _after_hops(loop: asyncio.AbstractEventLoop, hops: int, settled: threading.Event) -> None:
    if hops == 0:
        settled.set()
    else:
        loop.call_soon(_after_hops, loop, hops - 1, settled)


def _refuse(request: Request, error: BaseException) -> None:
    loop, future = request.owner

    def fail() -> None:
        if not future.done():
            future.set_exception(error)

    if not _call(loop, fail):
        log.warning("request %s failed after its loop closed: %s", request.request_id, error)
