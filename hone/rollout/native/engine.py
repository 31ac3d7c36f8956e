"""The native engine behind the contract: one thread decodes, loops in another await futures.

The decoding thread is the caller's own where loops are given to `play`, else one that the first request
starts: two threads that compute would each hold a set of torch's workers, and slow each other down.

Requests that loops make before anything can be answered go in as one batch, and after answers are
delivered the next step waits until the loops have asked again. So the batches, and with them the last
bits of every number, do not depend on thread timing (unless a loop truly waits for something outside).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling, TokenOutput
from hone.rollout.native.core import NativeCore
from hone.rollout.requests import Request, refuse_media
from hone.rollout.weights import load_weights

log = logging.getLogger(__name__)

_SETTLE_HOPS = 16
"""Turns of the event loop (a few µs each) for agent loops to ask again: a tool call takes nine."""
_SETTLE_TIMEOUT_S = 5.0
"""If an agent loop blocks the event loop longer than this, decoding goes on without it."""
_LOOK_S = 0.001
"""How often a loop that does not settle is looked at: it may have closed."""
_CLOSE_TIMEOUT_S = 30.0

T = TypeVar("T")


class NativeRollout:
    """A `RolloutEngine` over `NativeCore`."""

    def __init__(self, core: NativeCore) -> None:
        self._core = core
        self._outboxes: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        """What each loop asked for in its present turn; only that loop's thread touches it."""
        self._inbox: list[Request] = []  # on the way to the thread
        self._held: list[Request] = []  # asked for while aborted
        self._arrived = threading.Condition()  # guards inbox, held, paused, closed and failure
        self._door, self._room = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._driven = False  # the caller of `play` decodes, no thread of ours
        self._settled = threading.Event()
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
        if loop not in self._outboxes:
            self._outboxes[loop] = []
            loop.call_soon(self._flush, loop)
        self._outboxes[loop].append(request)
        try:
            return await future
        finally:
            request.cancelled = future.cancelled()

    def play(self, loops: Coroutine[Any, Any, T]) -> T:
        """Decode in this thread for agent loops that run in another, until they end."""
        with self._arrived:
            alone = self._thread is None and not self._driven
            self._driven |= alone
        if not alone:
            return asyncio.run(loops)
        outcome: Future[T] = Future()

        def run() -> None:
            try:
                outcome.set_result(asyncio.run(loops))
            except BaseException as error:
                outcome.set_exception(error)
            with self._arrived:
                self._settled.set()
                self._arrived.notify()

        threading.Thread(target=run, name="hone-loops", daemon=True).start()
        try:
            self._decode(until=outcome.done)
        finally:
            with self._arrived:
                self._driven = False
        return outcome.result()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._between_steps():
            try:
                load_weights(self._core.policy, weights)
            finally:
                self._core.forget()  # what was refused half way has changed some of them
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
        with self._between_steps(), self._arrived:
            if self._core.busy or self._inbox:
                raise RolloutError("sleep was asked for while requests run; abort them first")
            self._core.cache.free()
            self._core.forget()

    def wake_up(self) -> None:
        """The cache allocates when the next prompt comes; the weights may be others than before."""
        with self._between_steps():
            self._core.forget()

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

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self._submit(self._outboxes.pop(loop))

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
                if self._thread is None and not self._driven:
                    self._thread = threading.Thread(
                        target=self._decode, name="hone-decode", daemon=True
                    )
                    self._thread.start()
                self._arrived.notify()

    def _decode(self, until: Callable[[], bool] = lambda: False) -> None:
        try:
            while self._wait_for_work(until):
                with self._door:  # whoever wants the core between steps waits here
                    pass
                with self._room:
                    finished = self._step()
                self._deliver(finished)
        except BaseException as error:
            log.exception("decoding stopped")
            with self._arrived:
                self._failure = error
            self._fail(error)

    def _wait_for_work(self, until: Callable[[], bool]) -> bool:
        """Waits only when there is nothing to decode; False ends the decoding."""
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._closed or self._inbox or self._core.busy or until()
            )
            return not self._closed and bool(self._inbox or self._core.busy or not until())

    def _step(self) -> list[Request]:
        with self._arrived:
            arrived, self._inbox = self._inbox, []
        for request in arrived:
            self._core.add(request)
        return self._core.step(self._is_wanted) if self._core.busy else []

    def _is_wanted(self) -> bool:
        """Whether the core should end its step soon: a request has come, or somebody is at the door."""
        return bool(self._inbox) or self._closed or self._door.locked()

    def _deliver(self, finished: list[Request]) -> None:
        """Hand answers to their loops and give those loops the chance to ask again."""
        for loop, requests in _by_loop(finished).items():
            self._settled = settled = threading.Event()
            if _call(loop, _resolve, loop, requests, settled) and not _has_settled(loop, settled):
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


def _has_settled(loop: asyncio.AbstractEventLoop, settled: threading.Event) -> bool:
    """Wait until the loop has had its turns, or has closed: whoever got an answer may have left."""
    looks = round(_SETTLE_TIMEOUT_S / _LOOK_S)
    return any(settled.wait(_LOOK_S) or loop.is_closed() for _ in range(looks))


def _refuse(request: Request, error: BaseException) -> None:
    loop, future = request.owner

    def fail() -> None:
        if not future.done():
            future.set_exception(error)

    if not _call(loop, fail):
        log.warning("request %s failed after its loop closed: %s", request.request_id, error)
