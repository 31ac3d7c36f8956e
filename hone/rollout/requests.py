"""One request on its way through one of our engines: what is refused, and when it ends.

The native engine, the slow reference and the scripted fake share these rules; each draws tokens in its
own way.
"""

from __future__ import annotations

import asyncio
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
from hone.tokenizer import Tokenizer
from hone.types import Settings

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
    future: asyncio.Future[TokenOutput] | None = None
    """Its caller awaits it, where an engine decodes in another thread; cores never read it."""
    on_tokens: OnTokens | None = None
    streamed: int = 0
    """Tokens that `on_tokens` has seen."""
    cached_tokens: int | None = None
    """Tokens of the prompt found in the prefix cache; None where the engine has none."""

    @property
    def owner(self) -> asyncio.Future[TokenOutput]:
        assert self.future is not None
        return self.future

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def append(self, token: int, log_prob: float, version: int) -> None:
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)

    def stream(self) -> None:
        """Pass the new tokens to `on_tokens`; only in the event loop that awaits the request."""
        begin, end = self.streamed, len(self.versions)  # of a token the version is written last
        if self.on_tokens is not None and begin < end:
            self.streamed = end
            new = slice(begin, end)
            self.on_tokens(TokenDelta(self.token_ids[new], self.log_probs[new], self.versions[new]))

    def output(self) -> TokenOutput:
        assert self.stop_reason is not None
        return TokenOutput(
            self.token_ids,
            self.log_probs,
            self.versions,
            self.stop_reason,
            cached_tokens=self.cached_tokens,
        )


def select(requests: Iterable[Request], request_ids: Collection[str] | None) -> list[Request]:
    """The requests of these ids; None is all."""
    return [r for r in requests if request_ids is None or r.request_id in request_ids]


@dataclass(frozen=True)
class RequestRules:
    """What an engine accepts, and where a response ends."""

    eos_ids: frozenset[int]
    tokenizer: Tokenizer | None = None
    vocabulary: int | None = None
    max_positions: int | None = None

    @staticmethod
    def of(
        model_config: PreTrainedConfig, eos_ids: Sequence[int], tokenizer: Tokenizer | None
    ) -> RequestRules:
        text = model_config.get_text_config()
        return RequestRules(
            frozenset(eos_ids),
            tokenizer,
            getattr(text, "vocab_size", None),
            getattr(text, "max_position_embeddings", None),
        )

    def check(self, request: Request) -> None:
        """Refuse what cannot be computed, before it can disturb other requests."""
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
        if (
            (token in self.eos_ids and not sampling.ignore_eos)
            or token in sampling.stop_token_ids
            or (sampling.stop and self._ends_with_stop(request))
        ):
            return StopReason.STOP
        return StopReason.LENGTH if len(request.token_ids) >= sampling.max_tokens else None

    def _ends_with_stop(self, request: Request) -> bool:
        """Whether the newest token completed a stop string, which may begin several tokens before."""
        # A token is at least one byte; a few more keep the window's own first character whole.
        longest = max(len(s.encode()) for s in request.sampling.stop)
        assert self.tokenizer is not None, "check() refuses stop strings without one"
        tail = self.tokenizer.decode(
            request.token_ids[-(longest + 8) :], clean_up_tokenization_spaces=False
        )
        return any(s in tail for s in request.sampling.stop)


def decoding_failed(cause: BaseException) -> RolloutError:
    """The error of a request that was in flight."""
    error = RolloutError(f"decoding stopped: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


def engine_failed(cause: BaseException | None) -> RolloutError:
    """The error of a request to an engine that failed or closed earlier."""
    state = "is closed" if cause is None else f"failed earlier ({type(cause).__name__}: {cause})"
    error = RolloutError(f"the rollout engine {state}; build another")
    error.__cause__ = cause
    return error


def refuse_media(request_id: str, media: Settings | None, engine: str) -> None:
    """Refuse images and sound in an engine that reads text only."""
    if media:
        raise RolloutError(
            f"request {request_id} carries {', '.join(media)}; the {engine} engine reads text only"
        )
