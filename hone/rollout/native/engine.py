"""The native engine behind the contract: the thread that calls `drive` decodes, loops in others await.

There is no thread of its own: two threads that compute would each hold a set of torch's workers, and slow
each other down. Requests that an event loop makes in one of its turns go in as one batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from hone.event_loop import call_in
from hone.models.policy import PolicyModel
from hone.rollout.contract import (
    OnTokens,
    RolloutError,
    Sampling,
    StopReason,
    TokenOutput,
    Traits,
)
from hone.rollout.native.answers import answer, refuse, resolve, stream
from hone.rollout.requests import (
    Request,
    RequestRules,
    chosen,
    decoding_failed,
    engine_failed,
    refuse_media,
)
from hone.rollout.weights import WeightUpdate, load_weights
from hone.types import Settings

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 30.0


class _Cache(Protocol):
    def free(self) -> None: ...


class Core(Protocol):
    """What computes: the slot core on a CPU, the paged core on a GPU and in exact mode."""

    policy: PolicyModel
    version: int

    @property
    def cache(self) -> _Cache: ...

    @property
    def rules(self) -> RequestRules: ...

    @property
    def busy(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def step(self, wanted: Callable[[], bool]) -> list[Request]: ...

    def abort(self, request_ids: Collection[str] | None = None) -> list[Request]: ...

    def forget(self) -> None: ...


class NativeRollout:
    """A `RolloutEngine` over a core, driven by the thread that calls `drive`.

    `_unanswered` owns every request from its arrival to its answer; the queues and the core only pass it
    on. So whatever phase an error comes from, `_fail` reaches them all.
    """

    traits = Traits(decodes_with_module=True, adapters=True)

    def __init__(self, core: Core) -> None:
        self._core = core
        self._unanswered: dict[int, Request] = {}  # by identity
        self._outboxes: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        """What each loop asked for in its present turn; only that loop's thread touches it."""
        self._inbox: list[Request] = []  # on the way to the driving thread
        self._held: list[Request] = []  # asked for while paused
        # Guards all that stands here but the core and the outboxes.
        self._arrived = threading.Condition()
        self._submit_lock, self._step_lock = threading.Lock(), threading.Lock()
        self._driven = False
        self._notified = False
        self._in_core = 0  # requests given to the core that it has not given back
        self._streaming: dict[int, Request] = {}  # unanswered ones with `on_tokens`
        self._paused = False
        self._update = WeightUpdate()
        self._closed = False
        self._failure: BaseException | None = None

    @property
    def version(self) -> int:
        return self._core.version

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        *,
        on_tokens: OnTokens | None = None,
        multi_modal_data: Settings | None = None,
    ) -> TokenOutput:
        refuse_media(request_id, multi_modal_data, "native")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TokenOutput] = loop.create_future()
        request = Request(
            list(prompt_ids), sampling, request_id, future=future, on_tokens=on_tokens
        )
        self._core.rules.check(request)
        with self._arrived:
            self._raise_if_unusable()
            if not self._paused:
                self._update.refuse_tokens(f"request {request_id}")
            self._unanswered[id(request)] = request
            if on_tokens is not None:
                self._streaming[id(request)] = request
        try:
            if loop not in self._outboxes:
                self._outboxes[loop] = []
                loop.call_soon(self._flush, loop)
            self._outboxes[loop].append(request)
            return await future
        finally:
            request.cancelled |= future.cancelled()
            self._answered([request])

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        with self._between_steps(), self._arrived:
            ended = [] if self._stopped else self._end_everywhere(request_ids)
        answer(ended)

    async def pause(self, keep: bool = False) -> None:
        with self._between_steps(), self._arrived:
            self._paused = True
            ended = [] if keep or self._stopped else self._end_running()
        answer(ended)

    async def resume(self) -> None:
        with self._arrived:
            self._update.refuse_tokens("resume")
            self._paused = False
            self._inbox += self._held
            self._held = []
            self._arrived.notify()

    async def begin_update(self) -> None:
        with self._between_steps(), self._arrived:
            self._raise_if_unusable()
            self._update.begin(0 if self._paused else len(self._awaited()))

    async def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with self._between_steps():
            self._raise_if_unusable()
            with self._update.loading():
                load_weights(self._core.policy, weights)

    async def commit(self, version: int) -> None:
        with self._between_steps(), self._arrived:
            self._raise_if_unusable()
            self._update.commit()
            self._core.forget()
            self._core.version = version
            self._arrived.notify()

    async def sleep(self) -> None:
        with self._between_steps(), self._arrived:
            self._raise_if_unusable()
            if self._core.busy or self._inbox:
                raise RolloutError("sleep was asked for while requests run; abort them first")
            self._core.cache.free()
            self._core.forget()

    async def wake_up(self) -> None:
        """The cache allocates when the next prompt comes; the weights may be others than before."""
        with self._between_steps():
            self._raise_if_unusable()
            self._core.forget()

    async def close(self) -> None:
        """End the driving; requests that still wait are told so."""
        with self._arrived:
            self._closed = True
            self._arrived.notify()
        if self._step_lock.acquire(timeout=_CLOSE_TIMEOUT_S):  # the step that runs may end
            self._step_lock.release()
        self._refuse_all(RolloutError("the engine was closed while this request waited"))

    def drive(self, until: Callable[[], bool]) -> None:
        with self._arrived:
            if self._driven:
                raise RolloutError("another thread drives this engine; one at a time")
            self._driven = True
        try:
            while not (self._stopped or until()):
                self._decode()
        finally:
            self._drop_unwanted()

    def notify(self) -> None:
        with self._arrived:
            self._notified = True
            self._arrived.notify()

    def _drop_unwanted(self) -> None:
        """After driving: requests that nothing waits for leave the core, the others stay."""
        with self._between_steps(), self._arrived:
            self._driven = False
            if not self._stopped and not self._awaited():
                self._end_everywhere(None)
                self._unanswered, self._streaming = {}, {}

    def _awaited(self) -> list[Request]:
        """Unanswered requests, less those whose event loop has closed."""
        return [r for r in self._unanswered.values() if not r.owner.get_loop().is_closed()]

    def _end_everywhere(self, request_ids: Collection[str] | None) -> list[Request]:
        """End what runs, is on its way or held; what is in an outbox ends as it leaves that."""
        ended = self._end_running(request_ids)
        ended += chosen(self._held, request_ids)
        for request in chosen(self._unanswered.values(), request_ids):
            request.stop_reason = request.stop_reason or StopReason.ABORT
        self._held = [r for r in self._held if r.stop_reason is None]
        return ended

    def _end_running(self, request_ids: Collection[str] | None = None) -> list[Request]:
        """End what runs and what is on its way with the tokens it has."""
        arrived = chosen(self._inbox, request_ids)
        try:
            ended = self._core.abort(request_ids)
        except Exception as error:
            self._fail(error)
            raise
        self._in_core -= len(ended)
        for request in arrived:
            request.stop_reason = StopReason.ABORT
        self._inbox = [r for r in self._inbox if r.stop_reason is None]
        return [*ended, *arrived]

    @contextmanager
    def _between_steps(self) -> Iterator[None]:
        """Hold the core while it does not decode; the decode thread lets callers in first."""
        with self._submit_lock, self._step_lock:
            yield

    def _raise_if_unusable(self) -> None:
        if self._stopped:
            raise engine_failed(self._failure)

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        batch = self._outboxes.pop(loop)
        with self._arrived:
            if self._stopped:
                return  # they were unanswered then, and have been told
            ended = [r for r in batch if r.stop_reason is not None]
            alive = [r for r in batch if r.stop_reason is None]
            if self._paused:
                self._held += alive
            else:
                self._inbox += alive
            self._arrived.notify()
        resolve(ended)

    def _decode(self) -> None:
        """Decode until requests were answered, or until `notify`."""
        try:
            while self._wait_for_work():
                with self._submit_lock:  # calls that change the core go between two steps
                    pass
                with self._step_lock:
                    finished = self._step()
                    if self._streaming:
                        self._stream()
                if finished:
                    self._deliver(finished)
                    return
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise

    def _wait_for_work(self) -> bool:
        """Waits only when there is nothing to decode; False where `until` is to be asked."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._stopped or self._notified or self._may_decode)
            notified, self._notified = self._notified, False
            return not (self._stopped or notified)

    @property
    def _may_decode(self) -> bool:
        halted = self._paused or self._update.under_way
        return not halted and bool(self._inbox or self._core.busy)

    @property
    def _stopped(self) -> bool:
        return self._closed or self._failure is not None

    def _step(self) -> list[Request]:
        with self._arrived:
            if not self._may_decode:  # a pause came between
                return []
            arrived, self._inbox = self._inbox, []
        for request in arrived:
            self._core.add(request)
        self._in_core += len(arrived)
        finished = self._core.step(self._is_wanted)
        self._in_core -= len(finished)
        if self._in_core and not self._core.busy:
            raise RolloutError(f"the core lost {self._in_core} requests; this is a defect")
        return finished

    def _is_wanted(self) -> bool:
        """Whether the core should end its step soon: a request or a call between steps waits."""
        return bool(
            self._inbox
            or self._closed
            or self._notified
            or self._streaming
            or self._submit_lock.locked()
        )

    def _stream(self) -> None:
        with self._arrived:
            streaming = list(self._streaming.values())
        for request in streaming:
            if request.streamed < len(request.versions):
                call_in(request.owner.get_loop(), stream, request)

    def _deliver(self, finished: list[Request]) -> None:
        """Hand answers to their loops."""
        self._answered(answer(finished))

    def _answered(self, requests: list[Request]) -> None:
        with self._arrived:
            for request in requests:
                self._unanswered.pop(id(request), None)
                self._streaming.pop(id(request), None)

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
            self._inbox, self._held, self._streaming = [], [], {}
        for request in unanswered:
            refuse(request, error)
