"""The native engine: one thread decodes in `drive`; event loops in other threads await results.

The engine starts no thread, because a second thread would have its own pool of torch workers, and the two
pools would slow each other down. Requests that an event loop submits in one iteration enter the core as one
batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from hone.event_loop import call_soon_in_loop
from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutError, StopReason, TokenOutput, Traits, Weights
from hone.rollout.requests import (
    Request,
    RequestEngine,
    RequestRules,
    decoding_error,
    select,
)
from hone.rollout.weights import load_weights

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 30.0


class Core(Protocol):
    """The synchronous part of the engine: `NativeCore` with a slot cache or `PagedCore` with blocks."""

    policy: PolicyModel
    version: int

    @property
    def rules(self) -> RequestRules: ...

    @property
    def busy(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def step(self, should_return: Callable[[], bool]) -> list[Request]:
        """Runs one step, which may go on until `should_return()` is True; returns the finished requests."""

    def abort(self, request_ids: Collection[str] | None = None) -> list[Request]: ...

    def free_cache(self) -> None: ...

    def invalidate(self) -> None:
        """Drops what was computed from the parameters, except keys of running requests."""

    def park(self) -> None:
        """Drops the keys of running requests; they wait, with their tokens, to be prefilled again."""


class NativeRollout(RequestEngine):
    """A `RolloutEngine` over a core; the thread that calls `drive` decodes.

    `_pending` has every request from its arrival to its result, so `_fail` ends requests in every phase.
    """

    name = "native"
    traits = Traits(uses_policy_module=True, loads_adapters=True)

    def __init__(self, core: Core, *, keep_stale_kv: bool = False) -> None:
        """With `keep_stale_kv`, running requests keep the keys of old weights after `commit`."""
        super().__init__(core.rules)
        self._core, self._keep_stale_kv = core, keep_stale_kv
        self._pending: dict[int, Request] = {}  # by id(request)
        self._submitted: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        """Requests of each event loop's current iteration; only the thread of a loop accesses its list."""
        self._arrivals: list[Request] = []  # submitted, not yet in the core
        self._deferred: list[Request] = []  # submitted while paused
        # Guards every attribute except the core and `_submitted`.
        self._condition = threading.Condition()
        # `drive` holds `_step_lock` for one step, and before each step waits until `_control_lock` is free.
        self._control_lock, self._step_lock = threading.Lock(), threading.Lock()
        self._is_driven = False
        self._notified = False  # whether `drive` must call `until`
        self._num_in_core = 0  # number of requests
        self._streaming: dict[int, Request] = {}  # pending requests with `on_tokens`

    @property
    def version(self) -> int:
        return self._core.version

    async def _decode_request(self, request: Request) -> TokenOutput:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TokenOutput] = loop.create_future()
        request.future = future
        with self._condition:
            self._raise_if_stopped()
            if not self._paused:
                self._update.raise_if_in_progress(f"request {request.request_id}")
            self._pending[id(request)] = request
            if request.on_tokens is not None:
                self._streaming[id(request)] = request
        try:
            if loop not in self._submitted:
                self._submitted[loop] = []
                loop.call_soon(self._flush_submitted, loop)
            self._submitted[loop].append(request)
            return await future
        finally:
            request.cancelled |= future.cancelled()
            self._remove_pending([request])

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        with self._between_steps(), self._condition:
            aborted = [] if self._stopped else self._abort_requests(request_ids)
        _post_results(aborted)

    async def pause(self, keep: bool = False) -> None:
        with self._between_steps(), self._condition:
            self._paused = True
            aborted = [] if keep or self._stopped else self._abort_running()
        _post_results(aborted)

    async def resume(self) -> None:
        with self._condition:
            self._update.raise_if_in_progress("resume")
            self._paused = False
            self._arrivals += self._deferred
            self._deferred = []
            self._condition.notify()

    async def begin_update(self) -> None:
        with self._between_steps(), self._condition:
            self._raise_if_stopped()
            self._update.begin(0 if self._paused else len(self._awaited_requests()))

    async def load(self, weights: Weights) -> None:
        with self._between_steps():
            self._raise_if_stopped()
            with self._update.loading():
                load_weights(self._core.policy, weights)

    async def commit(self, version: int) -> None:
        with self._between_steps(), self._condition:
            self._raise_if_stopped()
            self._update.commit()
            self._core.invalidate()
            if not self._keep_stale_kv:
                self._core.park()
            self._core.version = version
            self._condition.notify()

    async def sleep(self) -> None:
        with self._between_steps(), self._condition:
            self._raise_if_stopped()
            if not self._awaited_requests():  # only cancelled requests are left
                self._remove_pending(self._abort_running())
            if not self._paused and (self._core.busy or self._arrivals):
                raise RolloutError(
                    "cannot sleep while requests run; pause the engine, or abort them"
                )
            self._core.park()
            self._core.free_cache()
            self._core.invalidate()

    async def wake_up(self) -> None:
        """Reads the parameters again, because they may have moved."""
        with self._between_steps():
            self._raise_if_stopped()
            self._core.invalidate()

    async def close(self) -> None:
        """Stops `drive` and fails pending requests."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if self._step_lock.acquire(timeout=_CLOSE_TIMEOUT_S):  # waits for the running step
            self._step_lock.release()
        self._fail_pending(RolloutError("the engine was closed while this request waited"))

    def drive(self, until: Callable[[], bool]) -> None:
        with self._condition:
            if self._is_driven:
                raise RolloutError("another thread already drives this engine")
            self._is_driven = True
        try:
            while not (self._stopped or until()):
                self._decode()
        finally:
            with self._between_steps(), self._condition:
                self._is_driven = False
                if not self._stopped and not self._awaited_requests():  # every event loop is closed
                    self._abort_requests(None)
                    self._pending, self._streaming = {}, {}

    def notify(self) -> None:
        with self._condition:
            self._notified = True
            self._condition.notify()

    def _awaited_requests(self) -> list[Request]:
        """Returns pending requests whose event loop is open, so that a caller may await them."""
        return [r for r in self._pending.values() if not r.awaited_future.get_loop().is_closed()]

    def _abort_requests(self, request_ids: Collection[str] | None) -> list[Request]:
        """Aborts running, arriving and deferred requests.

        A request that is still in `_submitted` is only marked: `_flush_submitted` ends it.
        """
        aborted = self._abort_running(request_ids)
        aborted += select(self._deferred, request_ids)
        for request in select(self._pending.values(), request_ids):
            request.stop_reason = request.stop_reason or StopReason.ABORT
        self._deferred = [r for r in self._deferred if r.stop_reason is None]
        return aborted

    def _abort_running(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """Aborts running and arriving requests; they keep the tokens sampled so far."""
        arriving = select(self._arrivals, request_ids)
        try:
            aborted = self._core.abort(request_ids)
        except Exception as error:
            self._fail(error)
            raise
        self._num_in_core -= len(aborted)
        for request in arriving:
            request.stop_reason = StopReason.ABORT
        self._arrivals = [r for r in self._arrivals if r.stop_reason is None]
        return [*aborted, *arriving]

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Holds the driving thread between two steps while the block runs."""
        with self._control_lock, self._step_lock:
            yield

    def _flush_submitted(self, loop: asyncio.AbstractEventLoop) -> None:
        """Passes the requests of one loop iteration to the driving thread."""
        batch = self._submitted.pop(loop)
        with self._condition:
            if self._stopped:
                return  # `_fail_pending` has failed them
            aborted = [r for r in batch if r.stop_reason is not None]
            active = [r for r in batch if r.stop_reason is None]
            if self._paused:
                self._deferred += active
            else:
                self._arrivals += active
            self._condition.notify()
        _set_results(aborted)

    def _decode(self) -> None:
        """Decodes until a request finishes or `notify` is called."""
        try:
            while self._wait_for_work():
                with self._control_lock:  # a call that waits in `_between_steps` goes first
                    pass
                with self._step_lock:
                    finished = self._step()
                    if self._streaming:
                        self._post_new_tokens()
                if finished:
                    self._deliver(finished)
                    return
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _wait_for_work(self) -> bool:
        """Waits for work; returns False if the engine stopped or `drive` must check `until`."""
        with self._condition:
            self._condition.wait_for(lambda: self._stopped or self._notified or self._can_decode)
            notified, self._notified = self._notified, False
            return not (self._stopped or notified)

    @property
    def _can_decode(self) -> bool:
        blocked = self._paused or self._update.in_progress
        return not blocked and bool(self._arrivals or self._core.busy)

    def _step(self) -> list[Request]:
        with self._condition:
            if not self._can_decode:  # paused after `_wait_for_work`
                return []
            arrivals, self._arrivals = self._arrivals, []
        for request in arrivals:
            self._core.add(request)
        self._num_in_core += len(arrivals)
        finished = self._core.step(self._should_return)
        self._num_in_core -= len(finished)
        if self._num_in_core and not self._core.busy:
            raise RolloutError(f"the core lost {self._num_in_core} requests; this is a defect")
        return finished

    def _should_return(self) -> bool:
        """Whether the core should end its step soon, because a request or a caller waits."""
        return bool(
            self._arrivals
            or self._closed
            or self._notified
            or self._streaming
            or self._control_lock.locked()
        )

    def _post_new_tokens(self) -> None:
        """Passes new tokens to the event loops of streaming requests."""
        with self._condition:
            streaming = list(self._streaming.values())
        for request in streaming:
            if request.num_streamed < len(request.versions):
                call_soon_in_loop(request.awaited_future.get_loop(), request.stream)

    def _deliver(self, finished: list[Request]) -> None:
        """Posts the results; removes requests whose event loop is closed, because nothing awaits them."""
        self._remove_pending(_post_results(finished))

    def _remove_pending(self, requests: list[Request]) -> None:
        with self._condition:
            for request in requests:
                self._pending.pop(id(request), None)
                self._streaming.pop(id(request), None)

    def _fail(self, error: BaseException) -> None:
        """Fails every pending request with `error` as the cause and refuses later requests."""
        log.error("decoding stopped", exc_info=error)
        with self._condition:
            self._failure = self._failure or error
        self._fail_pending(decoding_error(error))
        try:
            self._core.abort()  # frees the core's requests and memory
        except Exception:
            log.exception("the core could not be emptied after decoding stopped")

    def _fail_pending(self, error: RolloutError) -> None:
        with self._condition:
            pending, self._pending = list(self._pending.values()), {}
            self._arrivals, self._deferred, self._streaming = [], [], {}
        for request in pending:
            copy = RolloutError(*error.args)  # one copy per request, for separate tracebacks
            copy.__cause__ = error.__cause__
            if not call_soon_in_loop(
                request.awaited_future.get_loop(), _set_exception, request, copy
            ):
                log.warning(
                    "request %s failed after its event loop closed: %s", request.request_id, error
                )


def _post_results(requests: list[Request]) -> list[Request]:
    """Sets the results of requests in their event loops; returns the requests of closed loops."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Request]] = {}
    for request in requests:
        by_loop.setdefault(request.awaited_future.get_loop(), []).append(request)
    unposted: list[Request] = []
    for loop, batch in by_loop.items():
        if not call_soon_in_loop(loop, _set_results, batch):
            unposted += batch
    return unposted


def _set_results(requests: list[Request]) -> None:
    for request in requests:
        try:
            outcome: TokenOutput | RolloutError = request.output()
        except Exception as error:  # fails this request only
            outcome = decoding_error(error)
        request.set_outcome(outcome)


def _set_exception(request: Request, error: RolloutError) -> None:
    if not request.awaited_future.done():
        request.awaited_future.set_exception(error)
