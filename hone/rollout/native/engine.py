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
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from hone.event_loop import EventLoopRun, run_to_end
from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenOutput
from hone.rollout.native.core import NativeCore
from hone.rollout.requests import Request, decoding_failed, engine_failed, refuse_media
from hone.rollout.weights import load_weights

log = logging.getLogger(__name__)

_SETTLE_HOPS = 16
"""Turns of the event loop (a few µs each) for agent loops to ask again: a tool call takes nine."""
_SETTLE_TIMEOUT_S = 5.0
"""If an agent loop blocks the event loop longer than this, decoding goes on without it."""
_LOOK_S = 0.001
"""How often a loop that does not settle is looked at: it may have closed."""
_CLOSE_TIMEOUT_S = 30.0
_LOOPS_GRACE_S = 30.0
"""How long agent loops may take to end after decoding stopped, and again after they are cancelled."""

T = TypeVar("T")


class NativeRollout:
    """A `RolloutEngine` over `NativeCore`.

    `_unanswered` owns every request from its arrival to its answer; the queues and the core only pass it
    on. So whatever phase an error comes from, `_fail` reaches them all.
    """

    def __init__(self, core: NativeCore) -> None:
        self._core = core
        self._unanswered: dict[int, Request] = {}  # by identity
        self._outboxes: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        """What each loop asked for in its present turn; only that loop's thread touches it."""
        self._inbox: list[Request] = []  # on the way to the thread
        self._held: list[Request] = []  # asked for while aborted
        # Guards the unanswered, inbox, held, paused, driven, closed and failure.
        self._arrived = threading.Condition()
        self._submit_lock, self._step_lock = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._driven = False  # the caller of `play` decodes, no thread of ours
        self._settled = threading.Event()
        self._in_core = 0  # requests given to the core that it has not given back
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
        with self._arrived:
            self._raise_if_unusable()
            self._unanswered[id(request)] = request
        try:
            if loop not in self._outboxes:
                self._outboxes[loop] = []
                loop.call_soon(self._flush, loop)
            self._outboxes[loop].append(request)
            return await future
        finally:
            request.cancelled = future.cancelled()
            self._answered([request])

    def play(self, loops: Coroutine[Any, Any, T]) -> T:
        """Decode in this thread for agent loops that run in another, until they end."""
        with self._arrived:
            alone = self._thread is None and not self._driven
            self._driven |= alone
        if not alone:
            return run_to_end(loops)
        running, outcome = EventLoopRun(loops), Future[T]()

        def run() -> None:
            try:
                outcome.set_result(running.run())
            except BaseException as error:
                outcome.set_exception(error)
            with self._arrived:
                self._settled.set()
                self._arrived.notify()

        threading.Thread(target=run, name="hone-loops", daemon=True).start()
        try:
            self._decode(until=outcome.done)
            if self._stopped:
                self._end_loops(running, outcome)
        except BaseException:  # a Ctrl-C, say: the loops end first, so that tools are released
            running.cancel()
            wait([outcome], timeout=_LOOPS_GRACE_S)
            raise
        finally:
            self._stop_driving()
        return outcome.result()

    def _end_loops(self, running: EventLoopRun[T], outcome: Future[T]) -> None:
        """Every request has its error by now; loops that still do not end are cancelled."""
        if wait([outcome], timeout=_LOOPS_GRACE_S).done:
            return
        running.cancel()
        if not wait([outcome], timeout=_LOOPS_GRACE_S).done:
            log.warning("agent loops did not end after decoding stopped; they are left behind")
            raise engine_failed(self._failure)

    def _stop_driving(self) -> None:
        """Requests of other loops go on in a thread of ours; those that nothing waits for are dropped."""
        with self._between_steps(), self._arrived:
            self._driven = False
            if self._stopped or not (self._inbox or self._core.busy):
                return
            if self._unanswered:
                self._start_thread()
            else:
                self._empty_core()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self._between_steps():
            self._raise_if_unusable()
            try:
                load_weights(self._core.policy, weights)
            finally:
                self._core.forget()  # what was refused half way has changed some of them
            self._core.version = version

    def abort(self) -> None:
        with self._between_steps(), self._arrived:
            self._paused = True
            ended = [] if self._stopped else self._empty_core()
        for loop, requests in _by_loop(ended).items():
            _call(loop, _resolve, loop, requests, threading.Event())

    def _empty_core(self) -> list[Request]:
        """End what runs and what is on its way with the tokens it has."""
        try:
            ended = [*self._core.abort(), *self._inbox]
        except Exception as error:
            self._fail(error)
            raise
        for request in ended:
            request.stop_reason = StopReason.ABORT
        self._inbox, self._in_core = [], 0
        return ended

    def resume(self) -> None:
        with self._arrived:
            self._paused = False
            held, self._held = self._held, []
        if held:
            self._submit(held)

    def sleep(self) -> None:
        with self._between_steps(), self._arrived:
            self._raise_if_unusable()
            if self._core.busy or self._inbox:
                raise RolloutError("sleep was asked for while requests run; abort them first")
            self._core.cache.free()
            self._core.forget()

    def wake_up(self) -> None:
        """The cache allocates when the next prompt comes; the weights may be others than before."""
        with self._between_steps():
            self._raise_if_unusable()
            self._core.forget()

    def close(self) -> None:
        """Stop the thread; requests that still wait are told so."""
        with self._arrived:
            self._closed = True
            self._arrived.notify()
        if self._thread is not None:
            self._thread.join(timeout=_CLOSE_TIMEOUT_S)
        self._refuse_all(RolloutError("the engine was closed while this request waited"))

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the core while it does not decode; the decode thread lets callers in first."""
        with self._submit_lock, self._step_lock:
            yield

    def _raise_if_unusable(self) -> None:
        if self._stopped:
            raise engine_failed(self._failure)

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        self._submit(self._outboxes.pop(loop))

    def _submit(self, batch: list[Request]) -> None:
        try:
            with self._arrived:
                if self._stopped:
                    return  # they were unanswered then, and have been told
                if self._paused:
                    self._held += batch
                    return
                self._inbox += batch
                if self._thread is None and not self._driven:
                    self._start_thread()
                self._arrived.notify()
        except Exception as error:  # a thread could not be started
            self._fail(error)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._decode, name="hone-decode", daemon=True)
        thread.start()
        self._thread = thread

    def _decode(self, until: Callable[[], bool] = lambda: False) -> None:
        try:
            while self._wait_for_work(until):
                with self._submit_lock:  # calls that change the core go between two steps
                    pass
                with self._step_lock:
                    finished = self._step()
                self._deliver(finished)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception) and self._driven:
                raise

    def _wait_for_work(self, until: Callable[[], bool]) -> bool:
        """Waits only when there is nothing to decode; False ends the decoding."""
        with self._arrived:
            self._arrived.wait_for(
                lambda: self._stopped or self._inbox or self._core.busy or until()
            )
            return not self._stopped and bool(self._inbox or self._core.busy or not until())

    @property
    def _stopped(self) -> bool:
        return self._closed or self._failure is not None

    def _step(self) -> list[Request]:
        with self._arrived:
            arrived, self._inbox = self._inbox, []
        for request in arrived:
            self._core.add(request)
        self._in_core += len(arrived)
        finished = self._core.step(self._is_wanted) if self._core.busy else []
        self._in_core -= len(finished)
        if self._in_core and not self._core.busy:
            raise RolloutError(f"the core lost {self._in_core} requests; this is a defect")
        return finished

    def _is_wanted(self) -> bool:
        """Whether the core should end its step soon: a request or a call between steps waits."""
        return bool(self._inbox) or self._closed or self._submit_lock.locked()

    def _deliver(self, finished: list[Request]) -> None:
        """Hand answers to their loops and give those loops the chance to ask again."""
        for loop, requests in _by_loop(finished).items():
            self._settled = settled = threading.Event()
            if not _call(loop, _resolve, loop, requests, settled):
                self._answered(requests)
            elif not _has_settled(loop, settled):
                log.warning(
                    "an agent loop has blocked its event loop for %.0f s; decoding goes on without it",
                    _SETTLE_TIMEOUT_S,
                )

    def _answered(self, requests: list[Request]) -> None:
        with self._arrived:
            for request in requests:
                self._unanswered.pop(id(request), None)

    def _fail(self, error: BaseException) -> None:
        """The engine has failed: every request is told why, and later ones are refused."""
        log.error("decoding stopped", exc_info=error)
        with self._arrived:
            self._failure = self._failure or error
        self._refuse_all(decoding_failed(error))
        try:
            self._core.abort()  # it may hold requests and memory; nothing decodes any more
        except Exception:
            log.exception("the core could not be emptied after decoding stopped")

    def _refuse_all(self, error: RolloutError) -> None:
        with self._arrived:
            unanswered, self._unanswered = list(self._unanswered.values()), {}
            self._inbox, self._held = [], []
        for request in unanswered:
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
        if future.done():
            continue
        try:
            future.set_result(request.output())
        except Exception as error:  # this request's alone: the others have their answers
            future.set_exception(decoding_failed(error))
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


def _refuse(request: Request, error: RolloutError) -> None:
    loop, future = request.owner

    def fail() -> None:
        if not future.done():
            own = RolloutError(*error.args)  # raised in many places: each has its own traceback
            own.__cause__ = error.__cause__
            future.set_exception(own)

    if not _call(loop, fail):
        log.warning("request %s failed after its loop closed: %s", request.request_id, error)
