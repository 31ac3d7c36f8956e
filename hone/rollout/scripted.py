"""A fake engine for tests, which returns scripted answers one token at a time.

The engine implements the contract and records every request. Of the sampling parameters, it uses only
`max_tokens` and the stop conditions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass

from hone.rollout.contract import RolloutError, Sampling, StopReason, Traits, Weights
from hone.rollout.requests import Chunk, Request, RequestRules
from hone.rollout.streaming_engine import StreamingEngine, in_engine_loop
from hone.tokenizer import Tokenizer


@dataclass(frozen=True)
class ScriptedAnswer:
    """The tokens of an answer and, optionally, their log-probabilities."""

    token_ids: Sequence[int]
    log_probs: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.log_probs is not None and len(self.log_probs) != len(self.token_ids):
            raise ValueError(
                f"a scripted answer has {len(self.token_ids)} tokens but "
                f"{len(self.log_probs)} log_probs; give one log_prob per token, or None"
            )


Answer = str | Sequence[int] | ScriptedAnswer
"""Text is tokenized and gets an end-of-text token; token ids are used unchanged."""
Script = Callable[[list[int]], Answer] | Sequence[Answer]
"""A function of the prompt ids, or answers in the order of the requests."""


class ScriptedRollout(StreamingEngine):
    """A `RolloutEngine` that reads its answers from a script."""

    name = "scripted"
    traits = Traits(uses_policy_module=False, honors_seeds=False, log_probs_of_weights=False)

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] | None = None,
        seconds_per_token: float = 0.0,
    ) -> None:
        self._answer_function = script if callable(script) else None
        self._listed_answers: Iterator[Answer] = iter(()) if callable(script) else iter(script)
        if eos_ids is None:
            eos_id = getattr(tokenizer, "eos_token_id", None)
            eos_ids = () if eos_id is None else (eos_id,)
        super().__init__(RequestRules(frozenset(eos_ids), tokenizer))
        self._tokenizer, self._seconds_per_token = tokenizer, seconds_per_token
        self._answers: dict[int, ScriptedAnswer] = {}  # by id(request)
        self.asleep = False
        self.requests: list[Request] = []
        """Every accepted request, in order of arrival."""
        self.loaded_names: list[str] = []
        """The parameter names of all calls of `load`."""

    async def _backend_stream(
        self, request: Request, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        if self.asleep:
            raise RolloutError(f"request {request.request_id}: the engine sleeps; call wake_up")
        if id(request) not in self._answers:
            self.requests.append(request)
            self._answers[id(request)] = self._next_answer(request)
        answer = self._answers[id(request)]
        for index in range(len(request.token_ids), len(answer.token_ids)):
            await asyncio.sleep(self._seconds_per_token)
            log_prob = answer.log_probs[index] if answer.log_probs is not None else 0.0
            yield Chunk([int(answer.token_ids[index])], [log_prob])
        request.stop_reason = request.stop_reason or StopReason.STOP

    def _next_answer(self, request: Request) -> ScriptedAnswer:
        if self._answer_function is not None:
            try:
                answer = self._answer_function(request.prompt_ids)
            except SystemExit as error:  # would end the event loop of the engine
                raise RuntimeError(f"the script raised {error!r}") from error
        else:
            try:
                answer = next(self._listed_answers)
            except StopIteration:
                raise RolloutError(
                    f"the script has no answer for request {request.request_id} "
                    f"(request number {len(self.requests)}); give more answers, or a function"
                ) from None
        if isinstance(answer, ScriptedAnswer):
            return answer
        if not isinstance(answer, str):
            return ScriptedAnswer(list(answer))
        if self._tokenizer is None:
            raise RolloutError("the script has text answers; build the engine with a tokenizer")
        ids = list(self._tokenizer.encode(answer, add_special_tokens=False))
        eos_id = self._tokenizer.eos_token_id
        return ScriptedAnswer(ids if eos_id is None else [*ids, eos_id])

    async def _load(self, weights: Weights) -> None:
        self.loaded_names += [name for name, _ in weights]

    async def _backend_sleep(self) -> None:
        self.asleep = True

    @in_engine_loop
    async def wake_up(self) -> None:
        self.asleep = False
