"""Where requests of an engine that decodes in the event loop wait: for resume, and for new weights.

The slow reference and the scripted fake share it. It also tells every request of a failure: one
request's error ends them all, with the cause.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from hone.rollout.contract import RolloutError, StopReason
from hone.rollout.requests import Request, chosen, decoding_failed, engine_failed
from hone.rollout.weights import WeightUpdate


class RequestGate:
    """Requests between their arrival and their end. Verbs may come from other threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step_lock = threading.Lock()  # held while a token is drawn and while weights change
        self._running: dict[int, Request] = {}  # by identity
        self._held: dict[int, Request] = {}  # arrived while paused
        self._waiters: list[asyncio.Future[None]] = []
        self._paused = False
        self._closed = False
        self._failure: BaseException | None = None
        self._update = WeightUpdate()

    @contextmanager
    def admitted(self, request: Request) -> Iterator[None]:
        """Around a request; refuses it where the engine is closed, failed or has half an update."""
        with self._lock:
            self._raise_failure()
            if self._closed:
                raise RolloutError(f"request {request.request_id} came to an engine that is closed")
            if not self._paused:
                self._update.refuse_tokens(f"request {request.request_id}")
            (self._held if self._paused else self._running)[id(request)] = request
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(id(request), None)
                self._held.pop(id(request), None)

    async def turn(self, request: Request) -> bool:
        """Wait until the request may draw a token; False when it has ended."""
        while True:
            with self._lock:
                self._raise_failure()
                if request.stop_reason is not None:
                    return False
                if not self._paused:
                    return True
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
            await waiter

    @contextmanager
    def step(self, request: Request) -> Iterator[bool]:
        """Around the drawing of one token; False where a pause or an abort came first.

        An error of the engine inside fails every request; a refusal (RolloutError) only its own.
        """
        with self._step_lock:
            try:
                yield request.stop_reason is None and not self._paused
            except RolloutError:
                raise
            except BaseException as error:
                with self._lock:
                    self._failure = self._failure or error
                self._wake()
                if not isinstance(error, Exception):
                    raise
                raise decoding_failed(error) from error

    def abort(self, request_ids: Collection[str] | None = None) -> None:
        with self._lock:
            _end([*self._running.values(), *self._held.values()], request_ids)
        self._wake()

    def pause(self, keep: bool) -> None:
        with self._step_lock, self._lock:
            self._paused = True
            if not keep:
                _end(self._running.values(), None)
        self._wake()

    def resume(self) -> None:
        with self._lock:
            self._update.refuse_tokens("resume")
            self._paused = False
            self._running |= self._held
            self._held = {}
        self._wake()

    def begin_update(self) -> None:
        with self._step_lock, self._lock:
            self._raise_failure()
            self._update.begin(0 if self._paused else len(self._running))

    @contextmanager
    def loading(self) -> Iterator[None]:
        with self._step_lock, self._update.loading():
            yield

    def commit(self) -> None:
        with self._lock:
            self._update.commit()

    def close(self) -> None:
        """Running requests end as aborted; later ones are refused."""
        with self._lock:
            self._closed = True
        self.abort()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise engine_failed(self._failure)

    def _wake(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            with suppress(RuntimeError):  # its event loop has closed: nothing waits there
                waiter.get_loop().call_soon_threadsafe(_settle, waiter)


def _end(requests: Collection[Request], request_ids: Collection[str] | None) -> None:
    for request in chosen(requests, request_ids):
        request.stop_reason = request.stop_reason or StopReason.ABORT


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
