"""The requests of every engine: state, validation, stop conditions and streaming."""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hone.rollout.contract import (
    OnTokens,
    RolloutError,
    Sampling,
    StopReason,
    TokenDelta,
    TokenOutput,
)
from hone.rollout.weights import WeightUpdate
from hone.tokenizer import Tokenizer
from hone.types import Settings

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig


class ConnectionLost(Exception):
    """A connection broke off, or a server did not answer; the request may be issued again."""


@dataclass(frozen=True)
class Chunk:
    """New tokens of a request, from the stream of a `StreamingEngine`."""

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    finished: bool = False
    """Whether the server has ended the response: at an end token, a stop or the maximum length."""
    cached_tokens: int | None = None


@dataclass
class Request:
    """The state of one request in an engine."""

    prompt_ids: list[int]
    sampling: Sampling
    request_id: str
    priority: int = 0
    """Requests with a lower number start first; ties start in order of arrival."""
    start_key: tuple[int, ...] = ()
    """Requests start in ascending order of this key, which `WaitingRequests.add` sets."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop_reason: StopReason | None = None
    cancelled: bool = False
    """Whether the caller has cancelled the request, which then ends at its next token."""
    future: asyncio.Future[TokenOutput] | None = None
    """The future that the caller awaits; None before the engine has accepted the request."""
    on_tokens: OnTokens | None = None
    num_streamed: int = 0
    """Number of tokens that were passed to `on_tokens`."""
    cached_tokens: int | None = None
    """Number of prompt tokens that hit the prefix cache; None if the engine has no prefix cache."""
    num_preempted: int | None = None
    """Number of preemptions of the request; None if the engine does not count them."""
    routed_experts: Tensor | None = None

    @property
    def awaited_future(self) -> asyncio.Future[TokenOutput]:
        """`future`, which must not be None."""
        assert self.future is not None
        return self.future

    @property
    def all_ids(self) -> list[int]:
        """The token ids of prompt and response."""
        return self.prompt_ids + self.token_ids

    @property
    def length(self) -> int:
        """Number of prompt and response tokens."""
        return len(self.prompt_ids) + len(self.token_ids)

    def append(self, token: int, log_prob: float, version: int) -> None:
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)

    def stream(self) -> None:
        """Passes new tokens to `on_tokens`; must run in the event loop of the request.

        An error of the callback becomes the result of the request, which then ends.
        """
        begin, end = self.num_streamed, len(self.versions)  # `append` writes the version last
        if self.on_tokens is None or begin == end or self.awaited_future.done():
            return
        self.num_streamed = end
        new_tokens = self.token_ids[begin:end], self.log_probs[begin:end], self.versions[begin:end]
        try:
            self.on_tokens(TokenDelta(*new_tokens))
        except Exception as error:
            self.cancelled = True
            self.awaited_future.set_exception(error)

    def set_outcome(self, outcome: TokenOutput | BaseException) -> None:
        """Passes the last tokens to `on_tokens`, and sets the future if the caller still waits.

        This must run in the event loop of the request.
        """
        self.stream()
        if self.awaited_future.done():
            return
        if isinstance(outcome, BaseException):
            self.awaited_future.set_exception(outcome)
        else:
            self.awaited_future.set_result(outcome)

    def output(self) -> TokenOutput:
        assert self.stop_reason is not None
        return TokenOutput(
            self.token_ids,
            self.log_probs,
            self.versions,
            self.stop_reason,
            num_preempted=self.num_preempted,
            cached_tokens=self.cached_tokens,
            routed_experts=self.routed_experts,
        )


def select(requests: Iterable[Request], request_ids: Collection[str] | None) -> list[Request]:
    """Returns the requests with these ids; None selects all."""
    return [
        request for request in requests if request_ids is None or request.request_id in request_ids
    ]


class WaitingRequests:
    """The waiting requests of a core: the lowest priority starts first, ties in order of arrival.

    Of requests that arrive together, the largest max_tokens starts first: otherwise a long request could
    start last and then run alone in the batch.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []  # the last starts first
        self._num_added = self._num_batches = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def first(self) -> Request:
        """The request that starts first."""
        return self._requests[-1]

    def pop(self) -> Request:
        """Removes and returns the request that starts first."""
        return self._requests.pop()

    def add(self, request: Request) -> None:
        """Adds a request that arrives."""
        self._num_added += 1
        length = request.sampling.max_tokens
        request.start_key = (request.priority, self._num_batches, -length, self._num_added)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Adds a request that has started before, at the place of its arrival."""
        insort(self._requests, request, key=lambda r: tuple(-number for number in r.start_key))

    def end_batch(self) -> None:
        """Ends the batch of requests that arrive together."""
        self._num_batches += 1

    def abort(self, request_ids: Collection[str] | None) -> list[Request]:
        """Aborts and removes the requests with these ids (None: all)."""
        aborted = select(reversed(self._requests), request_ids)
        for request in aborted:
            request.stop_reason = StopReason.ABORT
        self._requests = [r for r in self._requests if r.stop_reason is None]
        return aborted


@dataclass(frozen=True)
class RequestRules:
    """Validates requests and decides when a response ends."""

    eos_ids: frozenset[int]
    tokenizer: Tokenizer | None = None
    vocab_size: int | None = None
    max_positions: int | None = None

    @staticmethod
    def of(
        model_config: PreTrainedConfig, eos_ids: Sequence[int], tokenizer: Tokenizer | None
    ) -> RequestRules:
        text_config = model_config.get_text_config()
        return RequestRules(
            frozenset(eos_ids),
            tokenizer,
            getattr(text_config, "vocab_size", None),
            getattr(text_config, "max_position_embeddings", None),
        )

    def check(self, request: Request) -> None:
        """Raises for an invalid request, which would make other requests of the same batch fail."""
        request_id, prompt = request.request_id, request.prompt_ids
        if not prompt:
            raise RolloutError(f"request {request_id} has an empty prompt")
        if self.vocab_size is not None and not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
            invalid_id = next(token for token in prompt if not 0 <= token < self.vocab_size)
            raise RolloutError(
                f"request {request_id} has token id {invalid_id} in its prompt, but the model has ids 0 to "
                f"{self.vocab_size - 1}; does the prompt come from the tokenizer of another model?"
            )
        max_length = len(prompt) + request.sampling.max_tokens
        if self.max_positions is not None and max_length > self.max_positions:
            raise RolloutError(
                f"request {request_id} may reach {max_length} tokens, but the model has "
                f"{self.max_positions} positions; shorten the prompt or max_tokens"
            )
        if request.sampling.stop and self.tokenizer is None:
            raise RolloutError(
                "stop strings need a tokenizer, and this engine was built without one"
            )

    def stop_reason(self, request: Request) -> StopReason | None:
        """Returns the stop reason after the newest token, or None."""
        if request.cancelled:
            return StopReason.ABORT
        sampling, token = request.sampling, request.token_ids[-1]
        if (
            (token in self.eos_ids and not sampling.ignore_eos)
            or token in sampling.stop_token_ids
            or (sampling.stop and self._ends_with_stop(request))
        ):
            return StopReason.STOP
        return StopReason.LENGTH if len(request.token_ids) >= sampling.max_tokens else None

    def _ends_with_stop(self, request: Request) -> bool:
        """Whether the newest token completes a stop string, which may start several tokens earlier."""
        assert self.tokenizer is not None, "check() refuses stop strings without a tokenizer"
        # The last `stop_bytes` tokens contain the stop string, because each token has at least one byte. 8
        # more tokens are decoded, because decoding may drop the leading space of the first word.
        stop_bytes = max(len(stop.encode()) for stop in request.sampling.stop)
        begin, tail = max(0, len(request.token_ids) - stop_bytes - 8), ""
        # A character has up to 4 tokens, one per byte. If the tail begins within a character, some tokenizers
        # decode all byte tokens up to the next word as replacement characters; then the tail begins earlier.
        for start in range(begin, max(begin - 4, -1), -1):
            tail = self.tokenizer.decode(
                request.token_ids[start:], clean_up_tokenization_spaces=False
            )
            if not tail.startswith("\N{REPLACEMENT CHARACTER}"):
                break
        return any(stop in tail for stop in request.sampling.stop)


def decoding_error(cause: BaseException) -> RolloutError:
    """Returns the error for requests that were running when decoding failed."""
    error = RolloutError(f"decoding stopped: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def engine_error(cause: BaseException | None) -> RolloutError:
    """Returns the error for calls to an engine that failed with `cause`, or was closed (`cause` is None)."""
    state = "is closed" if cause is None else f"failed earlier ({type(cause).__name__}: {cause})"
    error = RolloutError(f"the rollout engine {state}; build a new one")
    error.__cause__ = cause
    return error


class RequestEngine:
    """The base class of hone's engines, with their common state and the validation of requests."""

    name: str

    def __init__(self, rules: RequestRules) -> None:
        self._rules = rules
        self._update = WeightUpdate()
        self._failure: BaseException | None = None
        self._paused = self._closed = False

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        *,
        priority: int = 0,
        on_tokens: OnTokens | None = None,
        multi_modal_data: Settings | None = None,
    ) -> TokenOutput:
        if multi_modal_data:
            raise RolloutError(
                f"request {request_id} has {', '.join(multi_modal_data)}; the {self.name} engine supports "
                "only text"
            )
        # The ids may be numpy numbers, which cannot be sent to other processes as JSON.
        ids = list(map(int, prompt_ids))
        request = Request(ids, sampling, request_id, int(priority), on_tokens=on_tokens)
        self._rules.check(request)
        self._check_sampling(sampling, request_id)
        return await self._decode_request(request)

    def _check_sampling(self, sampling: Sampling, request_id: str) -> None:
        """Raises for sampling parameters that the engine does not support."""

    async def _decode_request(self, request: Request) -> TokenOutput:
        raise NotImplementedError

    @property
    def _stopped(self) -> bool:
        """Whether the engine is closed or has failed."""
        return self._closed or self._failure is not None

    def _raise_if_stopped(self) -> None:
        if self._stopped:
            raise engine_error(self._failure)

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise engine_error(self._failure)
