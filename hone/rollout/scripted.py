"""The in-tree fake: an engine that says what it was told to, one token a turn of the event loop.

For tests of agent loops and workers without a model. It keeps the contract's manners (limits, stops,
abort, versions) and remembers every request; it draws nothing, so sampling parameters only end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from hone.event_loop import run_to_end
from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenOutput
from hone.rollout.requests import AbortGate, Request, RequestRules, refuse_media


@dataclass(frozen=True)
class ScriptedAnswer:
    """Tokens to say, with the log-probability of each if it matters."""

    token_ids: Sequence[int]
    log_probs: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.log_probs is not None and len(self.log_probs) != len(self.token_ids):
            raise ValueError(
                f"a scripted answer has {len(self.token_ids)} tokens but "
                f"{len(self.log_probs)} log_probs; give one each, or none"
            )


Answer = str | Sequence[int] | ScriptedAnswer
"""Text is tokenised and ended with the tokenizer's end token; ids are said as they are."""
Script = Callable[[list[int]], Answer] | Sequence[Answer]
"""A function of the prompt's ids, or answers in the order of the requests."""


T = TypeVar("T")


class ScriptedRollout:
    """A `RolloutEngine` that reads its lines from a script."""

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Any = None,
        eos_ids: Sequence[int] | None = None,
        seconds_per_token: float = 0.0,
    ) -> None:
        self._answer_to: Callable[[list[int]], Answer] | None = None
        self._lines: Iterator[Answer] = iter(())
        if callable(script):
            self._answer_to = script
        else:
            self._lines = iter(script)
        own = getattr(tokenizer, "eos_token_id", None)
        ends = eos_ids if eos_ids is not None else () if own is None else (own,)
        self._tokenizer = tokenizer
        self._rules = RequestRules(frozenset(ends), tokenizer)
        self._pace = seconds_per_token
        self._gate = AbortGate()
        self._closed = False
        self.asleep = False
        self.version = 0
        self.requests: list[Request] = []
        """Every accepted request, in the order of asking; each holds what it was answered."""
        self.weights: list[str] = []
        """Names that `update_weights` was given, all calls together."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> TokenOutput:
        refuse_media(request_id, multi_modal_data, "scripted")
        request = Request(list(prompt_ids), sampling, request_id)
        self._rules.check(request)
        aborts_before = await self._gate.enter()
        if self.asleep or self._closed:
            state, verb = ("closed", "build another") if self._closed else ("asleep", "wake_up")
            raise RolloutError(f"request {request_id} came to an engine that is {state}; {verb}")
        self.requests.append(request)
        with self._gate.failing_all():
            answer = self._next_answer(request)
        await self._say(request, answer, aborts_before)
        return request.output()

    async def _say(self, request: Request, answer: ScriptedAnswer, aborts_before: int) -> None:
        log_probs = answer.log_probs or [0.0] * len(answer.token_ids)
        for token, log_prob in zip(answer.token_ids, log_probs, strict=True):
            await asyncio.sleep(self._pace)
            self._gate.raise_failure()
            if self._gate.aborts != aborts_before:
                request.stop_reason = StopReason.ABORT
                return
            request.token_ids.append(token)
            request.log_probs.append(log_prob)
            request.versions.append(self.version)
            with self._gate.failing_all():
                request.stop_reason = self._rules.stop_reason(request)
            if request.stop_reason is not None:
                return
        request.stop_reason = StopReason.STOP

    def _next_answer(self, request: Request) -> ScriptedAnswer:
        if self._answer_to is not None:
            answer = self._answer_to(request.prompt_ids)
        else:
            try:
                answer = next(self._lines)
            except StopIteration:
                raise RolloutError(
                    f"the script has no line left for request {request.request_id} "
                    f"(number {len(self.requests)}); give it more answers, or a function"
                ) from None
        if isinstance(answer, ScriptedAnswer):
            return answer
        if not isinstance(answer, str):
            return ScriptedAnswer(list(answer))
        if self._tokenizer is None:
            raise RolloutError("the script answers in text; build the engine with a tokenizer")
        ids = list(self._tokenizer.encode(answer, add_special_tokens=False))
        end = self._tokenizer.eos_token_id
        return ScriptedAnswer(ids if end is None else [*ids, end])

    def play(self, loops: Coroutine[Any, Any, T]) -> T:
        return run_to_end(loops)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.weights += [name for name, _ in weights]
        self.version = version

    def abort(self) -> None:
        self._gate.abort()

    def resume(self) -> None:
        self._gate.resume()

    def sleep(self) -> None:
        self.asleep = True

    def wake_up(self) -> None:
        self.asleep = False

    def close(self) -> None:
        """Running requests end as aborted; later ones are refused."""
        self._closed = True
        self._gate.abort()
        self._gate.resume()
