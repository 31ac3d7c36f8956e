"""A fake engine that answers from a script, one token at a time.

Tests of agent loops and workers use it instead of a model. It implements the contract (limits, stops,
abort, versions) and records every request; of the sampling parameters only limits and stops apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from hone.rollout.contract import RolloutError, StopReason, Traits
from hone.rollout.event_loop_engine import EventLoopEngine
from hone.rollout.requests import Request, RequestRules
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
                f"{len(self.log_probs)} log_probs; give one each, or none"
            )


Answer = str | Sequence[int] | ScriptedAnswer
"""Text is tokenized and an end-of-text token appended; ids are used unchanged."""
Script = Callable[[list[int]], Answer] | Sequence[Answer]
"""A function of the prompt's ids, or answers in the order of the requests."""


class ScriptedRollout(EventLoopEngine):
    """A `RolloutEngine` that reads its answers from a script."""

    name = "scripted"
    traits = Traits(decodes_with_module=False, seeded=False)

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: Sequence[int] | None = None,
        seconds_per_token: float = 0.0,
    ) -> None:
        self._script = script if callable(script) else None
        self._lines: Iterator[Answer] = iter(()) if callable(script) else iter(script)
        end = getattr(tokenizer, "eos_token_id", None)
        ends = eos_ids if eos_ids is not None else () if end is None else (end,)
        super().__init__(RequestRules(frozenset(ends), tokenizer), seconds_per_token)
        self._tokenizer = tokenizer
        self._answers: dict[int, ScriptedAnswer] = {}  # by id(request)
        self.asleep = False
        self.requests: list[Request] = []
        """Every accepted request, with its answer, in order of arrival."""
        self.weights: list[str] = []
        """The parameter names passed to `load`, over all calls."""

    def _start(self, request: Request) -> None:
        if self.asleep:
            raise RolloutError(
                f"request {request.request_id} came to an engine that is asleep; wake_up"
            )
        self.requests.append(request)
        self._answers[id(request)] = answer = self._next_answer(request)
        if not answer.token_ids:
            request.stop_reason = request.stop_reason or StopReason.STOP

    def _draw_one(self, request: Request) -> None:
        answer, at = self._answers[id(request)], len(request.token_ids)
        log_prob = answer.log_probs[at] if answer.log_probs is not None else 0.0
        request.append(answer.token_ids[at], log_prob, self.version)
        request.stop_reason = self._rules.stop_reason(request)
        if request.stop_reason is None and at + 1 == len(answer.token_ids):
            request.stop_reason = StopReason.STOP

    def _next_answer(self, request: Request) -> ScriptedAnswer:
        if self._script is not None:
            answer = self._script(request.prompt_ids)
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

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.weights += [name for name, _ in weights]

    async def sleep(self) -> None:
        self.asleep = True

    async def wake_up(self) -> None:
        self.asleep = False
