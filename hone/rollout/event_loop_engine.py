"""The base class of `HFRollout` and `ScriptedRollout`, which decode in the event loop of the caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

from torch import Tensor

from hone.rollout.contract import RolloutError, StopReason, TokenOutput
from hone.rollout.requests import (
    Request,
    RequestEngine,
    RequestRules,
    decoding_error,
    select,
)


class EventLoopEngine(RequestEngine):
    """A `RolloutEngine` whose subclasses sample tokens and load weights."""

    def __init__(self, rules: RequestRules, seconds_per_token: float = 0.0) -> None:
        super().__init__(rules)
        self.version = 0
        self._seconds_per_token = seconds_per_token
        self._state_lock = threading.Lock()
        self._step_lock = threading.Lock()  # held while a token is sampled and while weights change
        self._running: dict[int, Request] = {}  # by id(request)
        self._deferred: dict[int, Request] = {}  # arrived while paused
        self._waiters: list[asyncio.Future[None]] = []

    def _before_first_token(self, request: Request) -> None:
        """Runs once before the first token of a request."""

    def _sample_token(self, request: Request) -> None:
        """Appends one token; sets the stop reason if the response ends."""
        raise NotImplementedError

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        raise NotImplementedError

    async def _decode_request(self, request: Request) -> TokenOutput:
        with self._register(request):
            if await self._wait_until_running(request):
                with self._step(request):
                    self._before_first_token(request)
            while await self._wait_until_running(request):
                await asyncio.sleep(self._seconds_per_token)
                with self._step(request) as may_sample:
                    if may_sample:
                        self._sample_token(request)
                request.stream()
        return request.output()

    @contextmanager
    def _register(self, request: Request) -> Iterator[None]:
        """Registers a request while the block runs; raises if the engine is stopped or in an update."""
        with self._state_lock:
            self._raise_if_stopped()
            if not self._paused:
                self._update.raise_if_in_progress(f"request {request.request_id}")
            (self._deferred if self._paused else self._running)[id(request)] = request
        try:
            yield
        finally:
            with self._state_lock:
                self._running.pop(id(request), None)
                self._deferred.pop(id(request), None)

    async def _wait_until_running(self, request: Request) -> bool:
        """Waits while the engine is paused; returns False if the request has ended."""
        while True:
            with self._state_lock:
                self._raise_if_failed()
                if request.stop_reason is not None:
                    return False
                if not self._paused:
                    return True
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
            await waiter

    @contextmanager
    def _step(self, request: Request) -> Iterator[bool]:
        """Holds the step lock for one token; yields whether the request may sample one.

        A RolloutError in the block fails only this request; another error fails every request.
        """
        with self._step_lock:
            try:
                yield request.stop_reason is None and not self._paused
            except RolloutError:
                raise
            except BaseException as error:
                with self._state_lock:
                    self._failure = self._failure or error
                self._wake_waiters()
                if not isinstance(error, Exception):
                    raise
                raise decoding_error(error) from error

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        with self._state_lock:
            _abort([*self._running.values(), *self._deferred.values()], request_ids)
        self._wake_waiters()

    async def pause(self, keep: bool = False) -> None:
        with self._step_lock, self._state_lock:
            self._paused = True
            if not keep:
                _abort(self._running.values(), None)
        self._wake_waiters()

    async def resume(self) -> None:
        with self._state_lock:
            self._update.raise_if_in_progress("resume")
            self._paused = False
            self._running |= self._deferred
            self._deferred = {}
        self._wake_waiters()

    async def begin_update(self) -> None:
        with self._step_lock, self._state_lock:
            self._raise_if_failed()
            self._update.begin(0 if self._paused else len(self._running))

    async def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with self._step_lock, self._update.loading():
            self._load(weights)

    async def commit(self, version: int) -> None:
        with self._state_lock:
            self._update.commit()
        self.version = version

    async def sleep(self) -> None:
        """Does nothing, because the engine holds no memory between tokens."""

    async def wake_up(self) -> None:
        """Does nothing, because `sleep` frees nothing."""

    async def close(self) -> None:
        """Aborts running requests; later requests raise."""
        with self._state_lock:
            self._closed = True
        await self.abort()

    def _wake_waiters(self) -> None:
        with self._state_lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            with suppress(RuntimeError):  # the waiter's event loop has closed
                waiter.get_loop().call_soon_threadsafe(_wake, waiter)


def _abort(requests: Collection[Request], request_ids: Collection[str] | None) -> None:
    for request in select(requests, request_ids):
        request.stop_reason = request.stop_reason or StopReason.ABORT


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
