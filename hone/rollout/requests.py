"""One request on its way through an engine of ours: what is refused, and when it ends.

The native engine, the slow reference and the scripted fake share these rules; how tokens come to be is
each engine's own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenOutput


@dataclass
class Request:
    """One request on its way through an engine."""

    prompt_ids: list[int]
    sampling: Sampling
    request_id: str
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    cancelled: bool = False
    """Its caller has left: it ends at its next token."""
    owner: Any = None
    """The event loop and future that wait for it; engines' cores never look at it."""

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def output(self) -> TokenOutput:
        assert self.stop_reason is not None
        return TokenOutput(self.token_ids, self.log_probs, self.versions, self.stop_reason)


@dataclass(frozen=True)
class RequestRules:
    """What an engine accepts, and where a response ends."""

    eos_ids: frozenset[int]
    tokenizer: Any = None
    vocabulary: int | None = None
    max_positions: int | None = None

    @staticmethod
    def of(model_config: Any, eos_ids: Sequence[int], tokenizer: Any) -> RequestRules:
        text = model_config.get_text_config()
        return RequestRules(
            frozenset(eos_ids),
            tokenizer,
            getattr(text, "vocab_size", None),
            getattr(text, "max_position_embeddings", None),
        )

    def check(self, request: Request) -> None:
        """Raise the sentence of what cannot be done, before it can disturb other requests."""
        name, prompt = request.request_id, request.prompt_ids
        if not prompt:
            raise RolloutError(f"request {name} has an empty prompt")
        if self.vocabulary is not None and not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
            wrong = next(t for t in prompt if not 0 <= t < self.vocabulary)
            raise RolloutError(
                f"request {name} has token id {wrong} in its prompt, but the model knows 0 to "
                f"{self.vocabulary - 1}; is it tokenised by the model's own tokenizer?"
            )
        longest = len(prompt) + request.sampling.max_tokens
        if self.max_positions is not None and longest > self.max_positions:
            raise RolloutError(
                f"request {name} may reach {longest} tokens, but the model has "
                f"{self.max_positions} positions; shorten the prompt or max_tokens"
            )
        if request.sampling.stop and self.tokenizer is None:
            raise RolloutError("stop strings need a tokenizer; this engine was built without one")

    def stop_reason(self, request: Request) -> StopReason | None:
        """Why the newest token is the last one, or None."""
        if request.cancelled:
            return StopReason.ABORT
        sampling, token = request.sampling, request.token_ids[-1]
        if token in self.eos_ids and not sampling.ignore_eos:
            return StopReason.STOP
        if token in sampling.stop_token_ids:
            return StopReason.STOP
        if sampling.stop and self._ends_with_stop(request):
            return StopReason.STOP
        return StopReason.LENGTH if len(request.token_ids) >= sampling.max_tokens else None

    def _ends_with_stop(self, request: Request) -> bool:
        """Whether the newest token completed a stop string (it may have begun several tokens ago)."""
        # A token is at least one byte; a few more keep the window's own first character whole.
        longest = max(len(s.encode()) for s in request.sampling.stop)
        tail = self.tokenizer.decode(
            request.token_ids[-(longest + 8) :], clean_up_tokenization_spaces=False
        )
        return any(s in tail for s in request.sampling.stop)


class AbortGate:
    """Where new requests wait while an engine that decodes in the event loop is aborted.

    It also tells every request of a failure: one request's error ends them all, with the cause.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = True
        self._waiters: list[asyncio.Future[None]] = []
        self._failure: BaseException | None = None
        self.aborts = 0
        """How often `abort` was called: a request that sees it grow ends with what it has."""

    async def enter(self) -> int:
        """The count of aborts so far, once requests may start."""
        while True:
            self.raise_failure()
            with self._lock:
                if self._open:
                    return self.aborts
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
            await waiter

    def abort(self) -> None:
        with self._lock:
            self.aborts += 1
            self._open = False

    def resume(self) -> None:
        with self._lock:
            self._open = True
        self._wake()

    @contextmanager
    def failing_all(self) -> Iterator[None]:
        """An error of the engine inside fails every request; a refusal (RolloutError) only its own."""
        try:
            yield
        except RolloutError:
            raise
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error
            self._wake()
            if not isinstance(error, Exception):
                raise
            raise decoding_failed(error) from error

    def raise_failure(self) -> None:
        """Raise what failed an earlier request."""
        if self._failure is not None:
            raise engine_failed(self._failure)

    def _wake(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            with suppress(RuntimeError):  # its event loop has closed: nothing waits there
                waiter.get_loop().call_soon_threadsafe(_settle, waiter)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def decoding_failed(cause: BaseException) -> RolloutError:
    """What a request that was under way is told."""
    error = RolloutError(f"decoding stopped: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def engine_failed(cause: BaseException | None) -> RolloutError:
    """What a request to an engine that failed or closed earlier is told."""
    state = "is closed" if cause is None else f"failed earlier ({type(cause).__name__}: {cause})"
    error = RolloutError(f"the rollout engine {state}; build another")
    error.__cause__ = cause
    return error


def refuse_media(request_id: str, media: Any, engine: str) -> None:
    """Text-only engines say so instead of dropping an image."""
    if media:
        raise RolloutError(
            f"request {request_id} carries {', '.join(media)}; the {engine} engine reads text only"
        )
