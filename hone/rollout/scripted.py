"""The in-tree fake: an engine that says what it was told to, one token per turn of the event loop.

For tests of agent loops and workers without a model. It keeps the contract's manners (limits, stops,
abort, versions) and remembers every request; it draws nothing, so sampling parameters only end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hone.rollout.contract import (
    OnTokens,
    RolloutError,
    Sampling,
    StopReason,
    TokenOutput,
    Traits,
)
from hone.rollout.gate import RequestGate
from hone.rollout.requests import Request, RequestRules, refuse_media
from hone.tokenizer import Tokenizer
from hone.types import Settings


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


class ScriptedRollout:
    """A `RolloutEngine` that reads its lines from a script."""

    traits = Traits(decodes_with_module=False, seeded=False)

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Tokenizer | None = None,
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
        self._gate = RequestGate()
        self.asleep = False
        self.version = 0
        self.requests: list[Request] = []
        """Every accepted request, in the order of asking; each holds what it was answered."""
        self.weights: list[str] = []
        """Names that `load` was given, all calls together."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        *,
        on_tokens: OnTokens | None = None,
        multi_modal_data: Settings | None = None,
    ) -> TokenOutput:
        refuse_media(request_id, multi_modal_data, "scripted")
        request = Request(list(prompt_ids), sampling, request_id, on_tokens=on_tokens)
        self._rules.check(request)
        with self._gate.admitted(request):
            if await self._gate.turn(request):
                if self.asleep:
                    raise RolloutError(
                        f"request {request_id} came to an engine that is asleep; wake_up"
                    )
                self.requests.append(request)
                with self._gate.step(request):
                    answer = self._next_answer(request)
                await self._say(request, answer)
        return request.output()

    async def _say(self, request: Request, answer: ScriptedAnswer) -> None:
        log_probs = answer.log_probs or [0.0] * len(answer.token_ids)
        while len(request.token_ids) < len(answer.token_ids):
            await asyncio.sleep(self._pace)
            if not await self._gate.turn(request):
                return
            with self._gate.step(request) as may_draw:
                if may_draw:
                    at = len(request.token_ids)
                    request.token_ids.append(answer.token_ids[at])
                    request.log_probs.append(log_probs[at])
                    request.versions.append(self.version)
                    request.stop_reason = self._rules.stop_reason(request)
            request.stream()
        request.stop_reason = request.stop_reason or StopReason.STOP

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

    async def abort(self, request_ids: Collection[str] | None = None) -> None:
        self._gate.abort(request_ids)

    async def pause(self, keep: bool = False) -> None:
        self._gate.pause(keep)

    async def resume(self) -> None:
        self._gate.resume()

    async def begin_update(self) -> None:
        self._gate.begin_update()

    async def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with self._gate.loading():
            self.weights += [name for name, _ in weights]

    async def commit(self, version: int) -> None:
        self._gate.commit()
        self.version = version

    async def sleep(self) -> None:
        self.asleep = True

    async def wake_up(self) -> None:
        self.asleep = False

    async def close(self) -> None:
        """Running requests end as aborted; later ones are refused."""
        self._gate.close()
