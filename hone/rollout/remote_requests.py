"""The base class of engines that decode in another process: vLLM, SGLang and running servers.

Every token is streamed, so that no token is lost when the other process dies. A pause ends all streams unless
a subclass keeps them; later, each request is issued again with its tokens as part of the prompt. No token is
sampled while weights change, so versions are exact. Only one event loop, in a thread, uses the state.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

from hone.event_loop import call_soon_in_loop
from hone.ops.counter_rng import fold_seed
from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenOutput, Traits
from hone.rollout.requests import (
    Chunk,
    ConnectionLost,
    Request,
    RequestEngine,
    RequestRules,
    decoding_error,
    engine_error,
)

T = TypeVar("T")
Weights = Iterable[tuple[str, Tensor]]
log = logging.getLogger(__name__)

_CANCEL_TIMEOUT_S = 30.0
"""The longest wait until cancelled requests have ended on their server."""


@dataclass(eq=False)
class RunningRequest:
    """A request and its current task."""

    request: Request
    deferred: bool
    """Whether the request arrived while the engine was paused."""
    task: asyncio.Task[None] | None = None
    """The task of the current stream, or of the recovery after a lost connection."""
    failed_streams: int = 0
    """Number of consecutive streams that failed without a new token."""


class RemoteEngine(RequestEngine):
    """A `RolloutEngine` whose subclasses stream tokens and update weights.

    Methods that begin with `_remote` run in the event loop of the engine's thread.
    """

    traits: Traits
    retries = 3
    """A request fails after more than this number of consecutive streams without a token."""

    def __init__(self, rules: RequestRules) -> None:
        super().__init__(rules)
        self.version = 0
        self._running: dict[int, RunningRequest] = {}  # by id(entry)
        self._loop = asyncio.new_event_loop()
        self._not_paused = asyncio.Event()
        self._not_paused.set()
        threading.Thread(
            target=self._loop.run_forever, name=f"hone-{self.name}", daemon=True
        ).start()

    # -- implemented by subclasses --------------------------------------------------------------

    def _remote_stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Yields the next tokens or raises ConnectionLost; `aclose` ends the request on the server."""
        raise NotImplementedError

    async def _remote_recover(self, error: ConnectionLost) -> None:
        """Waits until the server has recovered with the current weights; raises if it does not recover."""

    async def _remote_pause(self) -> None:
        """Stops decoding on the server, after every stream has ended."""

    async def _remote_resume(self) -> None: ...

    async def _remote_begin(self) -> None: ...

    async def _load(self, weights: Weights) -> None:
        """Transfers tensors; runs in the caller's thread and event loop."""
        raise NotImplementedError

    async def _remote_commit(self, version: int, has_new_weights: bool) -> None:
        """Ends the update; the next token uses the new weights, if there are any, and no old KV cache."""

    async def _remote_sleep(self) -> None: ...

    async def _remote_wake_up(self) -> None: ...

    async def _remote_close(self) -> None: ...

    # -- requests -------------------------------------------------------------------------------

    async def _decode_request(self, request: Request) -> TokenOutput:
        request.future = asyncio.get_running_loop().create_future()
        serve_future = self._submit(self._serve(request))
        futures: set[asyncio.Future[Any]] = {serve_future, request.awaited_future}
        try:
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if not request.awaited_future.done():  # `close` has cancelled `_serve` before its start
                await serve_future
            return await request.awaited_future
        finally:
            request.cancelled = True
            for future in futures:
                future.cancel()

    def _submit(self, coroutine: Coroutine[None, None, T]) -> asyncio.Future[T]:
        """Runs a coroutine in the engine's event loop; returns a future of the caller's event loop."""
        if self._closed:
            coroutine.close()
            raise engine_error(None)
        return asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self._until_closed(coroutine), self._loop)
        )

    async def _until_closed(self, coroutine: Coroutine[None, None, T]) -> T:
        """Awaits a coroutine; raises RolloutError if `close` has cancelled it."""
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self._closed:
                raise engine_error(None) from None
            raise

    async def _serve(self, request: Request) -> None:
        """Streams a request until it ends, over several streams if one breaks off; sets its future."""
        try:
            with self._register(request) as entry:
                while request.stop_reason is None:
                    await self._run_stream(entry)
            outcome: TokenOutput | BaseException = request.output()
        except RolloutError as error:
            outcome = error
        except Exception as error:
            outcome = decoding_error(error)
            self._fail(error)
        call_soon_in_loop(request.awaited_future.get_loop(), _set_outcome, request, outcome)

    @contextmanager
    def _register(self, request: Request) -> Iterator[RunningRequest]:
        self._raise_if_stopped()
        if not self._paused:
            self._update.raise_if_in_progress(f"request {request.request_id}")
        entry = RunningRequest(request, deferred=self._paused)
        self._running[id(entry)] = entry
        try:
            yield entry
        finally:
            del self._running[id(entry)]

    async def _run_stream(self, entry: RunningRequest) -> None:
        """Runs one stream until it ends or is cancelled; after a lost connection, waits for the recovery."""
        num_tokens = len(entry.request.token_ids)
        error = await self._run_task(entry, self._stream_tokens(entry.request))
        if isinstance(error, ConnectionLost):
            if entry.request.stop_reason is not None:  # aborted meanwhile
                return
            has_new_tokens = len(entry.request.token_ids) > num_tokens
            entry.failed_streams = 1 if has_new_tokens else entry.failed_streams + 1
            if entry.failed_streams > self.retries:
                raise RolloutError(
                    f"request {entry.request.request_id}: its stream broke off {entry.failed_streams} "
                    f"times, the last time because {error}"
                )
            log.info("%s: %s; the request is issued again", self.name, error)
            # An abort also ends the wait for a server that restarts.
            error = await self._run_task(entry, self._remote_recover(error))
        if error is not None:
            raise error

    async def _run_task(
        self, entry: RunningRequest, coroutine: Coroutine[None, None, None]
    ) -> BaseException | None:
        """Runs a coroutine as the request's task; returns its error, or None if there is none."""
        task = entry.task = asyncio.ensure_future(coroutine)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:  # the caller has cancelled the request
            task.cancel()
            with suppress(BaseException):
                await task
            raise
        if self._failure is not None:
            raise decoding_error(self._failure)
        return None if task.cancelled() else task.exception()

    async def _stream_tokens(self, request: Request) -> None:
        await self._not_paused.wait()
        if request.stop_reason is not None:
            return
        async with aclosing(
            self._remote_stream(request, self._remaining_sampling(request))
        ) as chunks:
            async for chunk in chunks:
                if request.stop_reason is not None:  # aborted meanwhile
                    return
                self._append(request, chunk)
                if request.on_tokens is not None:
                    call_soon_in_loop(request.awaited_future.get_loop(), _deliver_tokens, request)
                if request.stop_reason is not None:
                    return
                if chunk.finished:
                    raise RolloutError(
                        f"request {request.request_id}: the server ended it at token {len(request.token_ids)}"
                        f", neither an end token nor a stop, before max_tokens={request.sampling.max_tokens}"
                    )
                # An abort or a pause may run before the next buffered chunk.
                await asyncio.sleep(0)
        raise ConnectionLost("the stream ended without a finish reason")

    def _remaining_sampling(self, request: Request) -> Sampling:
        """Returns the sampling parameters of the remaining tokens.

        If the server does not sample by absolute position, a continuation gets another seed: with the same
        seed, the server would repeat the random numbers of the first tokens.
        """
        sampling, num_tokens = request.sampling, len(request.token_ids)
        if not num_tokens:
            return sampling
        seed = sampling.seed
        if not self.traits.samples_by_position:
            seed = fold_seed(seed, num_tokens)
        return replace(sampling, max_tokens=sampling.max_tokens - num_tokens, seed=seed)

    def _append(self, request: Request, chunk: Chunk) -> None:
        """Appends the tokens of a chunk up to the token that ends the response; raises for invalid values."""
        request_id, vocab_size = request.request_id, self._rules.vocab_size
        if len(chunk.token_ids) != len(chunk.log_probs):
            raise RolloutError(
                f"request {request_id}: the server sent {len(chunk.token_ids)} tokens with "
                f"{len(chunk.log_probs)} log-probs"
            )
        for token, log_prob in zip(chunk.token_ids, chunk.log_probs, strict=True):
            if type(token) is not int or not 0 <= token < (vocab_size or math.inf):
                raise RolloutError(
                    f"request {request_id}: the server sent token id {token!r}, but the model has ids 0 to "
                    f"{(vocab_size or 0) - 1}; does the server run another model?"
                )
            if not isinstance(log_prob, float | int) or not -math.inf < log_prob <= 1e-4:
                raise RolloutError(
                    f"request {request_id}: the server sent {log_prob!r} as log-prob of token {token}; a "
                    "log-prob is a finite number of at most 0"
                )
            request.append(token, min(float(log_prob), 0.0), self.version)
            request.stop_reason = self._rules.stop_reason(request)
            if request.stop_reason is not None:
                break  # the server may have sent tokens after the end
        if request.cached_tokens is None:
            request.cached_tokens = chunk.cached_tokens

    # -- control --------------------------------------------------------------------------------

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        await self._submit(self._abort(request_ids, include_deferred=True))

    async def _abort(self, request_ids: Collection[str] | None, *, include_deferred: bool) -> None:
        for entry in list(self._running.values()):
            request = entry.request
            is_selected = request_ids is None or request.request_id in request_ids
            if is_selected and (include_deferred or not entry.deferred):
                request.stop_reason = request.stop_reason or StopReason.ABORT
                if entry.task is not None:
                    entry.task.cancel()

    async def pause(self, keep: bool = False) -> None:
        await self._submit(self._pause(keep))

    async def _pause(self, keep: bool) -> None:
        self._raise_if_failed()
        self._not_paused.clear()
        self._paused = True
        if not keep:
            await self._abort(None, include_deferred=False)
        tasks = [entry.task for entry in self._running.values() if entry.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._remote_pause()

    async def resume(self) -> None:
        await self._submit(self._resume())

    async def _resume(self) -> None:
        self._update.raise_if_in_progress("resume")
        if self._paused:
            await self._remote_resume()
        for entry in self._running.values():
            entry.deferred = False
        self._paused = False
        self._not_paused.set()

    async def begin_update(self) -> None:
        await self._submit(self._begin())

    async def _begin(self) -> None:
        await self._wait_for_cancelled_requests()
        self._raise_if_failed()
        self._update.begin(0 if self._paused else len(self._running))
        self._has_new_weights = False
        await self._remote_begin()

    async def load(self, weights: Weights) -> None:
        with self._update.loading():
            await self._load(self._note_new_weights(weights))

    def _note_new_weights(self, weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for item in weights:
            self._has_new_weights = True
            yield item

    async def commit(self, version: int) -> None:
        await self._submit(self._commit(version))

    async def _commit(self, version: int) -> None:
        with self._update.committing():
            await self._remote_commit(version, self._has_new_weights)
        self.version = version

    async def sleep(self) -> None:
        await self._submit(self._sleep())

    async def _wait_for_cancelled_requests(self) -> None:
        """Waits until cancelled requests have ended on their server."""
        deadline = self._loop.time() + _CANCEL_TIMEOUT_S
        while any(entry.request.cancelled for entry in self._running.values()):
            if self._loop.time() > deadline:
                return
            await asyncio.sleep(0.001)

    async def _sleep(self) -> None:
        await self._wait_for_cancelled_requests()
        if self._running and not self._paused:
            raise RolloutError("cannot sleep while requests run; abort them first")
        await self._remote_sleep()

    async def wake_up(self) -> None:
        await self._submit(self._remote_wake_up())

    async def close(self) -> None:
        if self._closed:
            return
        close_future = self._submit(self._close())
        self._closed = True
        await close_future
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _close(self) -> None:
        self._closed = True  # `_close` may run before `close` sets this
        await self._abort(None, include_deferred=True)
        self._not_paused.set()
        while self._running:
            await asyncio.sleep(0.001)
        await self._remote_close()
        # Calls that wait for a server would never return after the event loop has stopped.
        other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in other_tasks:
            task.cancel()
        await asyncio.gather(*other_tasks, return_exceptions=True)

    def _fail(self, error: BaseException) -> None:
        """Fails every request with `error`."""
        if self._failure is None:
            self._failure = error
            for entry in self._running.values():
                if entry.task is not None:
                    entry.task.cancel()


def _deliver_tokens(request: Request) -> None:
    """Passes new tokens to `on_tokens`; an error of the callback ends the request."""
    try:
        if not request.awaited_future.done():
            request.stream()
    except BaseException as error:
        request.awaited_future.set_exception(error)


def _set_outcome(request: Request, outcome: TokenOutput | BaseException) -> None:
    _deliver_tokens(request)
    if request.awaited_future.done():
        return
    if isinstance(outcome, BaseException):
        request.awaited_future.set_exception(outcome)
    else:
        request.awaited_future.set_result(outcome)
