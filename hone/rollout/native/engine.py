"""The native engine behind the contract: a thread that decodes, and futures that loops await.

Requests that loops make before anything can be answered go in as one batch, and after answers are
delivered the next step waits until the loops have asked again. So the batches, and with them the last
bits of every number, do not depend on thread timing (unless a loop truly waits for something outside).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling, TokenOutput
from hone.rollout.native.core import NativeCore, Request

log = logging.getLogger(__name__)

_SETTLE_HOPS = 6
"""Turns of the event loop given to agent loops to ask again after answers arrive."""
_SETTLE_TIMEOUT_S = 5.0
"""If an agent loop blocks the event loop longer than this, decoding goes on without it."""


class NativeRollout:
    """A `RolloutEngine` over `NativeCore`; the decode thread starts with the first request."""

    def __init__(self, core: NativeCore) -> None:
        self._core = core
        self._inbox: queue.Queue[list[Request] | None] = queue.Queue()
        self._outbox: list[Request] = []
        self._held: list[Request] = []
        self._thread: threading.Thread | None = None
        self._abort = threading.Event()
        self._paused = False
        self._failure: BaseException | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> TokenOutput:
        if multi_modal_data:
            raise RolloutError(
                f"request {request_id} carries {', '.join(multi_modal_data)}; the native engine "
                "reads text only"
            )
        if self._failure is not None:
            raise RolloutError("the decode thread has stopped") from self._failure
        loop = asyncio.get_running_loop()
        future: asyncio.Future[TokenOutput] = loop.create_future()
        request = Request(list(prompt_ids), sampling, request_id, owner=(loop, future))
        if self._paused:
            self._held.append(request)
        else:
            if not self._outbox:
                loop.call_soon(self._flush)
            self._outbox.append(request)
        return await future

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = dict(self._core._policy.lm.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own:
                    raise RolloutError(
                        f"update_weights got {name!r}, which the model does not have"
                    )
                own[name].copy_(tensor)
        self._core.version = version

    def abort(self) -> None:
        self._paused = True
        self._abort.set()
        self._inbox.put([])

    def resume(self) -> None:
        self._paused = False
        held, self._held = self._held, []
        if held:
            self._submit(held)

    def sleep(self) -> None:
        self._core.cache.free()

    def wake_up(self) -> None:
        """Nothing to do: the cache allocates when the next prompt comes."""

    def close(self) -> None:
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(timeout=30)
            self._thread = None

    def _flush(self) -> None:
        batch, self._outbox = self._outbox, []
        if self._paused:
            self._held += batch
        else:
            self._submit(batch)

    def _submit(self, batch: list[Request]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hone-decode", daemon=True)
            self._thread.start()
        self._inbox.put(batch)

    def _run(self) -> None:
        try:
            while self._take_requests():
                if self._abort.is_set():
                    self._abort.clear()
                    self._deliver(self._core.abort())
                elif self._core.busy:
                    self._deliver(self._core.step())
        except BaseException as error:
            self._failure = error
            self._fail(error)

    def _take_requests(self) -> bool:
        """Move what has arrived into the core; waits only when there is nothing to decode."""
        while True:
            try:
                batch = self._inbox.get(block=not self._core.busy)
            except queue.Empty:
                return True
            if batch is None:
                return False
            for request in batch:
                try:
                    self._core.add(request)
                except RolloutError as error:
                    _resolve_later(request, error)
            if self._abort.is_set():
                return True

    def _deliver(self, finished: list[Request]) -> None:
        """Hand answers to their loops and give those loops the chance to ask again."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        for request in finished:
            by_loop.setdefault(request.owner[0], []).append(request)
        for loop, requests in by_loop.items():
            settled = threading.Event()
            try:
                loop.call_soon_threadsafe(_resolve, loop, requests, settled)
            except RuntimeError:  # the loop was closed: its owner no longer waits
                continue
            if not settled.wait(_SETTLE_TIMEOUT_S):
                log.warning(
                    "an agent loop has blocked its event loop for %.0f s; decoding goes on without it",
                    _SETTLE_TIMEOUT_S,
                )

    def _fail(self, error: BaseException) -> None:
        stranded = self._core.abort()
        while not self._inbox.empty():
            stranded += self._inbox.get_nowait() or []
        for request in stranded:
            _resolve_later(request, error)


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


def _resolve_later(request: Request, error: BaseException) -> None:
    loop, future = request.owner

    def fail() -> None:
        if not future.done():
            future.set_exception(error)

    try:
        loop.call_soon_threadsafe(fail)
    except RuntimeError:
        log.warning("request %s failed after its loop closed: %s", request.request_id, error)
