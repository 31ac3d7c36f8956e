"""The base class of engines that stream tokens: vLLM, SGLang, running servers, `hf` and `scripted`.

Every token is streamed, so that no token is lost when a server dies. A pause ends all streams unless a
subclass keeps them; later, each request is issued again with its tokens as part of the prompt. No token is
sampled while weights change, so versions are exact. Only one event loop, in a thread, uses the state.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from hone.event_loop import call_soon_in_loop
from hone.ops.counter_rng import fold_seed
from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenOutput, Traits, Weights
from hone.rollout.requests import (
    Chunk,
    ConnectionLost,
    Request,
    RequestEngine,
    RequestRules,
    decoding_error,
    engine_error,
)
from hone.rollout.weights import check_all_loaded, check_name_and_shape

T = TypeVar("T")
P = ParamSpec("P")
Engine = TypeVar("Engine", bound="StreamingEngine")
log = logging.getLogger(__name__)

_CANCEL_TIMEOUT_S = 30.0
"""The longest wait until cancelled requests have ended on their server."""


@dataclass(eq=False)
class RunningRequest:
    """A request in the engine, and the task that works on it."""

    request: Request
    deferred: bool
    """Whether the request arrived while the engine was paused; `resume` starts the request."""
    task: asyncio.Task[None] | None = None
    """The task of the current stream, or of the recovery after a lost connection."""
    failed_streams: int = 0
    """Number of consecutive streams that failed without a new token."""


def in_engine_loop(
    method: Callable[Concatenate[Engine, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Engine, P], Coroutine[Any, Any, T]]:
    """Decorates a method of an engine, which then runs in the event loop of the engine's thread."""

    @functools.wraps(method)
    async def run(self: Engine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if asyncio.get_running_loop() is self._loop:
            return await method(self, *args, **kwargs)
        return await self._submit(method(self, *args, **kwargs))

    return run


class StreamingEngine(RequestEngine):
    """A `RolloutEngine` whose subclasses stream tokens from a backend, and update its weights.

    The backend is a server, a process or a model. Methods that begin with `_backend` run in the event loop of
    the engine's thread.
    """

    traits: Traits
    retries = 3
    """A request fails after more than this number of consecutive streams without a token."""

    def __init__(self, rules: RequestRules, parameters: Mapping[str, Tensor] | None = None) -> None:
        """`parameters` has all parameters that an update must load; None disables this check."""
        super().__init__(rules)
        self.version = 0
        self._parameters = parameters
        self._loaded_names: set[str] = set()  # of the current weight update
        self._running: set[RunningRequest] = set()
        self._loop = asyncio.new_event_loop()
        self._not_paused = asyncio.Event()
        self._not_paused.set()
        threading.Thread(
            target=self._loop.run_forever, name=f"hone-{self.name}", daemon=True
        ).start()
        # Garbage collection ends the thread of an engine that is not closed.
        weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)

    # -- implemented by subclasses --------------------------------------------------------------

    def _backend_stream(self, request: Request, sampling: Sampling) -> AsyncGenerator[Chunk, None]:
        """Yields the next tokens or raises ConnectionLost; `aclose` ends the request in the backend.

        `sampling` has the parameters of the remaining tokens: `max_tokens` does not count the tokens of
        `request.token_ids`.
        """
        raise NotImplementedError

    async def _backend_recover(self, error: ConnectionLost) -> None:
        """Waits until the server has recovered with the current weights; raises if it does not recover."""

    async def _backend_pause(self) -> None:
        """Stops decoding on the server, after every stream has ended."""

    async def _backend_resume(self) -> None: ...

    async def _backend_begin(self) -> None: ...

    async def _load(self, weights: Weights) -> None:
        """Transfers tensors; runs in the caller's thread and event loop."""
        raise NotImplementedError

    async def _backend_commit(self, version: int) -> None:
        """Ends the weight update; the next token uses the new weights, if any, and no old KV cache."""

    async def _backend_sleep(self) -> None: ...

    async def _backend_close(self) -> None: ...

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

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Runs a coroutine in the engine's event loop; returns a future of the caller's event loop."""

        async def until_closed() -> T:
            """Awaits the coroutine; raises RolloutError if `close` has cancelled this call."""
            try:
                return await coroutine
            except asyncio.CancelledError:
                if self._closed:
                    raise engine_error(None) from None
                raise

        if self._closed:
            coroutine.close()
            raise engine_error(None)
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(until_closed(), self._loop))

    async def _serve(self, request: Request) -> None:
        """Streams a request until it ends, with a new stream after each interruption; sets the future."""
        running = RunningRequest(request, deferred=self._paused)
        try:
            self._raise_if_stopped()
            if not self._paused:
                self._update.raise_if_in_progress(f"request {request.request_id}")
            self._running.add(running)
            while request.stop_reason is None:
                await self._run_stream(running)
            outcome: TokenOutput | BaseException = request.output()
        except RolloutError as error:
            outcome = error
        except Exception as error:
            outcome = decoding_error(error)
            self._fail(error)
        finally:
            self._running.discard(running)
        call_soon_in_loop(request.awaited_future.get_loop(), request.set_outcome, outcome)

    async def _run_stream(self, running: RunningRequest) -> None:
        """Runs one stream until it ends or is cancelled; after a lost connection, waits for the recovery."""
        request = running.request
        num_tokens = len(request.token_ids)
        error = await self._run_task(running, self._stream_tokens(request))
        if isinstance(error, ConnectionLost):
            if request.stop_reason is not None:  # aborted meanwhile
                return
            has_new_tokens = len(request.token_ids) > num_tokens
            running.failed_streams = 1 if has_new_tokens else running.failed_streams + 1
            if running.failed_streams > self.retries:
                raise RolloutError(
                    f"request {request.request_id}: its stream broke off {running.failed_streams} times, the "
                    f"last time because {error}"
                )
            log.info("%s: %s; the request is issued again", self.name, error)
            # An abort also ends the wait for a server that restarts.
            error = await self._run_task(running, self._backend_recover(error))
        if error is not None:
            raise error

    async def _run_task(
        self, running: RunningRequest, coroutine: Coroutine[None, None, None]
    ) -> BaseException | None:
        """Runs a coroutine as the request's task; returns its error, or None if there is none."""
        task = running.task = asyncio.ensure_future(coroutine)
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
        sampling, num_tokens = request.sampling, len(request.token_ids)
        if num_tokens:
            # With the same seed, a backend that does not sample by position would repeat the random numbers
            # of the first tokens.
            by_position = self.traits.samples_by_position
            seed = sampling.seed if by_position else fold_seed(sampling.seed, num_tokens)
            sampling = replace(sampling, max_tokens=sampling.max_tokens - num_tokens, seed=seed)
        async with aclosing(self._backend_stream(request, sampling)) as chunks:
            async for chunk in chunks:
                if request.stop_reason is not None:  # aborted meanwhile
                    return
                self._append(request, chunk)
                if request.on_tokens is not None:
                    call_soon_in_loop(request.awaited_future.get_loop(), request.stream)
                if request.stop_reason is not None:
                    return
                if chunk.finished:
                    raise RolloutError(
                        f"request {request.request_id}: the server ended it at token {len(request.token_ids)}"
                        f", neither an end token nor a stop, before max_tokens={request.sampling.max_tokens}"
                    )
                # An abort or a pause may run before the next buffered chunk.
                await asyncio.sleep(0)
        if request.stop_reason is None:
            raise ConnectionLost("the stream ended without a finish reason")

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

    @in_engine_loop
    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        self._end(
            running
            for running in self._running
            if request_ids is None or running.request.request_id in request_ids
        )

    def _end(self, entries: Iterable[RunningRequest]) -> None:
        """Ends requests with the reason `abort`, unless they have ended already."""
        for running in entries:
            running.request.stop_reason = running.request.stop_reason or StopReason.ABORT
            if running.task is not None:
                running.task.cancel()

    @in_engine_loop
    async def pause(self, keep: bool = False) -> None:
        self._raise_if_failed()
        self._not_paused.clear()
        self._paused = True
        if not keep:
            self._end(running for running in self._running if not running.deferred)
        tasks = [running.task for running in self._running if running.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._backend_pause()

    @in_engine_loop
    async def resume(self) -> None:
        self._update.raise_if_in_progress("resume")
        if self._paused:
            await self._backend_resume()
        for running in self._running:
            running.deferred = False
        self._paused = False
        self._not_paused.set()

    @in_engine_loop
    async def begin_update(self) -> None:
        await self._wait_for_cancelled_requests()
        self._raise_if_failed()
        self._update.begin(0 if self._paused else len(self._running))
        self._loaded_names = set()
        await self._backend_begin()

    async def load(self, weights: Weights) -> None:
        with self._update.loading():
            await self._load(map(self._check_weight, weights))

    def _check_weight(self, weight: tuple[str, Tensor]) -> tuple[str, Tensor]:
        if self._parameters is not None:
            check_name_and_shape(*weight, self._parameters)
        self._loaded_names.add(weight[0])
        return weight

    @in_engine_loop
    async def commit(self, version: int) -> None:
        with self._update.committing():
            if self._loaded_names and self._parameters is not None:
                check_all_loaded(self._loaded_names, self._parameters)
            await self._backend_commit(version)
        self.version = version

    @in_engine_loop
    async def sleep(self) -> None:
        await self._wait_for_cancelled_requests()
        if self._running and not self._paused:
            raise RolloutError("cannot sleep while requests run; pause the engine, or abort them")
        await self._backend_sleep()

    async def _wait_for_cancelled_requests(self) -> None:
        """Waits until cancelled requests have ended on their server."""
        deadline = self._loop.time() + _CANCEL_TIMEOUT_S
        while any(running.request.cancelled for running in self._running):
            if self._loop.time() > deadline:
                return
            await asyncio.sleep(0.001)

    async def wake_up(self) -> None:
        """Restores what `_backend_sleep` has freed."""

    async def close(self) -> None:
        if not self._closed:
            close_future = self._submit(self._close())
            self._closed = True
            await close_future
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _close(self) -> None:
        self._closed = True  # `_close` may run before `close` sets this
        self._end(self._running)
        self._not_paused.set()
        while self._running:
            await asyncio.sleep(0.001)
        await self._backend_close()
        # Calls that wait for a server would never return after the event loop has stopped.
        other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in other_tasks:
            task.cancel()
        await asyncio.gather(*other_tasks, return_exceptions=True)

    def _fail(self, error: BaseException) -> None:
        """Fails every request with `error`."""
        if self._failure is None:
            self._failure = error
            for running in self._running:
                if running.task is not None:
                    running.task.cancel()
