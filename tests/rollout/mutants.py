"""Engines that are each broken in one way, and the clause that must detect this."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenDelta, TokenOutput
from hone.rollout.native.core import NativeCore
from hone.rollout.native.engine import NativeRollout
from hone.rollout.requests import Request, WaitingRequests

from .factories import NativeFactory


class Mutant(NativeFactory):
    """A native engine with a broken core or a broken engine class."""

    def __init__(
        self, core: type[NativeCore] = NativeCore, engine: type[NativeRollout] = NativeRollout
    ) -> None:
        self.name = (core if core is not NativeCore else engine).__name__
        self.core_class, self.engine_class = core, engine


# -- broken cores ----------------------------------------------------------------------------


class LogProbsAtTemperatureOne(NativeCore):
    def _sample(self, logits: Tensor) -> None:
        requests = list(self._running)
        super()._sample(logits)
        for row, request in zip(torch.log_softmax(logits, -1), requests, strict=True):
            request.log_probs[-1] = float(row[request.token_ids[-1]])


class LogProbsAfterTruncation(NativeCore):
    def _sample(self, logits: Tensor) -> None:
        requests = list(self._running)
        super()._sample(logits)
        for row, request in zip(logits, requests, strict=True):
            if request.sampling.top_k > 0:
                best = row.topk(request.sampling.top_k).values
                request.log_probs[-1] = float(row[request.token_ids[-1]] - best.logsumexp(0))


class DrawsAtHalfTheTemperature(NativeCore):
    def _sample(self, logits: Tensor) -> None:
        super()._sample(logits * 2)


class DrawsDependOnTheBatch(NativeCore):
    def _sample(self, logits: Tensor) -> None:
        self._sampling = None
        original = [r.sampling for r in self._running]
        for request in self._running:
            request.sampling = replace(
                request.sampling, seed=request.sampling.seed + len(self._running)
            )
        requests = list(self._running)
        super()._sample(logits)
        for request, sampling in zip(requests, original, strict=True):
            request.sampling = sampling


class DrawsAtThePositionInTheResponse(NativeCore):
    def _sample(self, logits: Tensor) -> None:
        prompts = [r.prompt_ids for r in self._running]
        requests = list(self._running)
        for request in requests:
            request.prompt_ids = []
        super()._sample(logits)
        for request, prompt in zip(requests, prompts, strict=True):
            request.prompt_ids = prompt


class DecodePositionsOffByOne(NativeCore):
    def _hidden_states(self, ids: list[int], positions: Tensor, layout: Any) -> Tensor:
        return super()._hidden_states(
            ids, positions + 1 if len(positions) == len(self._running) else positions, layout
        )


class PaddingLeaksIntoShortPrompts(NativeCore):
    """Reads the logits one row too early if several prompts are computed together."""

    def _next_logits(self, admitted: list[Request]) -> Tensor:
        logits = super()._next_logits(admitted)
        return logits.roll(1, 0) if len(admitted) > 1 else logits


class StopStringsWithinOneTokenOnly(NativeCore):
    def _sample(self, logits: Tensor) -> None:
        requests = list(self._running)
        super()._sample(logits)
        for request in requests:
            text = self.rules.tokenizer.decode(request.token_ids[-1:])
            reason, stops = request.stop_reason, request.sampling.stop
            if reason is StopReason.STOP and stops and not any(s in text for s in stops):
                request.stop_reason = None


class EndTokenGoesUnnoticed(NativeCore):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "eos_ids": ()})


class VersionStaysBehind(NativeCore):
    def _sample(self, logits: Tensor) -> None:
        requests = list(self._running)
        super()._sample(logits)
        for request in requests:
            request.versions[-1] = max(request.versions[-1] - 1, 0)


class EveryPromptComputedAnew(NativeCore):
    def _admit(self) -> list[Request]:
        return [self._waiting.pop()] if self._waiting else []


# -- broken shells ---------------------------------------------------------------------------


class _Altered(NativeRollout):
    def request(self, sampling: Sampling) -> Sampling:
        return sampling

    def answer(self, prompt: list[int], out: TokenOutput) -> TokenOutput:
        return out

    async def generate(
        self, prompt_ids: Any, sampling: Sampling, request_id: str, **options: Any
    ) -> TokenOutput:
        expected = self.request(sampling)
        out = await super().generate(prompt_ids, expected, request_id, **options)
        return self.answer(list(prompt_ids), out)


class SeedIgnored(_Altered):
    def request(self, sampling: Sampling) -> Sampling:
        return replace(sampling, seed=0)


class TopKIgnored(_Altered):
    def request(self, sampling: Sampling) -> Sampling:
        return replace(sampling, top_k=-1)


class TopPIgnored(_Altered):
    def request(self, sampling: Sampling) -> Sampling:
        return replace(sampling, top_p=1.0)


class MinPIgnored(_Altered):
    def request(self, sampling: Sampling) -> Sampling:
        return replace(sampling, min_p=0.0)


class IgnoreEosIgnored(_Altered):
    def request(self, sampling: Sampling) -> Sampling:
        return replace(sampling, ignore_eos=False)


class OneTokenTooMany(_Altered):
    def request(self, sampling: Sampling) -> Sampling:
        return replace(sampling, max_tokens=sampling.max_tokens + 1)


class GreedyIsSampled(_Altered):
    def request(self, sampling: Sampling) -> Sampling:
        return replace(sampling, temperature=sampling.temperature or 1.0)


class StopTokenDropped(_Altered):
    def answer(self, prompt: list[int], out: TokenOutput) -> TokenOutput:
        cut = slice(None, -1 if out.stop_reason is StopReason.STOP else None)
        return replace(
            out,
            token_ids=out.token_ids[cut],
            log_probs=out.log_probs[cut],
            versions=out.versions[cut],
        )


class PromptEchoed(_Altered):
    def answer(self, prompt: list[int], out: TokenOutput) -> TokenOutput:
        return replace(out, token_ids=prompt + out.token_ids)


class AbortForgetsWhatWasSaid(_Altered):
    def answer(self, prompt: list[int], out: TokenOutput) -> TokenOutput:
        if out.stop_reason is StopReason.ABORT:
            return replace(out, token_ids=[], log_probs=[], versions=[])
        return out


class PauseDoesNotHoldNewRequests(NativeRollout):
    async def pause(self, keep: bool = False) -> None:
        await super().pause(keep)
        await self.resume()


class PauseEndsWhatItShouldKeep(NativeRollout):
    async def pause(self, keep: bool = False) -> None:
        await super().pause()


class PauseGoesOnDecoding(NativeRollout):
    """`pause` defers new requests and does not stop running requests."""

    @property
    def _can_decode(self) -> bool:
        return bool(self._arrivals or self._core.busy)


class PauseForgetsKeys(NativeRollout):
    async def pause(self, keep: bool = False) -> None:
        await super().pause(keep)
        self._core.cache.free()
        self._core.cache.reserve(1024, 0)  # type: ignore[attr-defined]


class ResumeDropsWhatWasHeld(NativeRollout):
    async def resume(self) -> None:
        self._deferred = []
        await super().resume()


class AbortEndsEveryRequest(NativeRollout):
    async def abort(self, request_ids: Any = None) -> None:
        await super().abort()


class AbortLeavesTheQueueRunning(NativeRollout):
    async def abort(self, request_ids: Any = None) -> None:
        waiting, self._core._waiting = self._core._waiting, WaitingRequests()  # type: ignore[attr-defined]
        await super().abort(request_ids)
        self._core._waiting = waiting  # type: ignore[attr-defined]
        self._num_in_core = len(waiting) + len(self._core._running)  # type: ignore[attr-defined]


class AbortMovesNoSlot(NativeCore):
    """The last sequence moves into the free slot without its keys."""

    def abort(self, request_ids: Any = None) -> list[Request]:
        copy, self.cache.copy = self.cache.copy, lambda *_: None  # type: ignore[method-assign]
        try:
            return super().abort(request_ids)
        finally:
            self.cache.copy = copy  # type: ignore[method-assign]


class LongestFirst(NativeCore):
    def add(self, request: Request) -> None:
        super().add(request)
        self._waiting._requests.sort(key=lambda r: r.sampling.max_tokens)


class TiesStartInReverse(NativeCore):
    def add(self, request: Request) -> None:
        super().add(request)
        self._waiting._requests.sort(key=lambda r: (-r.priority, r.start_key))


class CommitKeepsOldKeys(NativeCore):
    def park(self) -> None:
        """Running requests keep their keys."""


class ParkedRequestsStartAgain(NativeCore):
    def park(self) -> None:
        for request in self._running:
            request.token_ids, request.log_probs, request.versions = [], [], []
        super().park()


class SleepRefusesKeptRequests(NativeRollout):
    async def sleep(self) -> None:
        if self._core.busy:
            raise RolloutError("requests run")
        await super().sleep()


class AbortHoldsNewRequests(NativeRollout):
    async def abort(self, request_ids: Any = None) -> None:
        await super().abort(request_ids)
        await self.pause()


class StreamsNothing(NativeRollout):
    def _post_new_tokens(self) -> None:
        """Streams all tokens at the end of the response."""


class StreamsTheFirstTokensTwice(_Altered):
    async def generate(
        self,
        prompt_ids: Any,
        sampling: Sampling,
        request_id: str,
        *,
        on_tokens: Any = None,
        **options: Any,
    ) -> TokenOutput:
        def doubled(delta: TokenDelta) -> None:
            on_tokens(delta)
            on_tokens(delta)

        own = doubled if on_tokens is not None else None
        return await super().generate(prompt_ids, sampling, request_id, on_tokens=own, **options)


class ErrorsOfOnTokensEndEveryRequest(_Altered):
    async def generate(
        self,
        prompt_ids: Any,
        sampling: Sampling,
        request_id: str,
        *,
        on_tokens: Any = None,
        **options: Any,
    ) -> TokenOutput:
        def guarded(delta: TokenDelta) -> None:
            try:
                on_tokens(delta)
            except Exception as error:
                self._fail(error)
                raise

        own = guarded if on_tokens is not None else None
        return await super().generate(prompt_ids, sampling, request_id, on_tokens=own, **options)


class WeightsAreDropped(NativeRollout):
    async def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        await super().load(list(weights)[1:])


class UnknownWeightsAreSkipped(NativeRollout):
    async def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for item in weights:
            with suppress(RolloutError):
                await super().load([item])
        self._update._load_error = None


class HalfAnUpdateIsUsed(NativeRollout):
    async def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        await super().load(weights)
        self._update.in_progress = False

    async def commit(self, version: int) -> None:
        self._update.in_progress = True
        await super().commit(version)


class UpdatesNeedNoBeginning(NativeRollout):
    async def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._update.in_progress = True
        await super().load(weights)

    async def commit(self, version: int) -> None:
        self._update.in_progress = True
        await super().commit(version)


class UpdatesUnderRunningRequests(NativeRollout):
    async def begin_update(self) -> None:
        self._update.begin(0)


class SleepKeepsTheCache(NativeRollout):
    async def sleep(self) -> None:
        """`sleep` does not free the cache."""


class FailuresAreSwallowed(NativeRollout):
    def _fail(self, error: BaseException) -> None:
        """Ignores errors of the core."""


class FailuresReachTheQueuesOnly(NativeRollout):
    """A failure reaches only requests that are in a queue."""

    def _fail_pending(self, error: RolloutError) -> None:
        queued = [*self._core.abort(), *self._arrivals, *self._deferred]
        self._pending = {id(request): request for request in queued}
        super()._fail_pending(error)


class CloseForgetsWaiters(NativeRollout):
    def _fail_pending(self, error: RolloutError) -> None:
        if "closed" not in str(error):
            super()._fail_pending(error)


class EmptyPromptsAreFilled(NativeRollout):
    async def generate(
        self, prompt_ids: Any, sampling: Sampling, request_id: str, **options: Any
    ) -> TokenOutput:
        return await super().generate(prompt_ids or [0], sampling, request_id, **options)


MUTANTS: list[tuple[Mutant, str]] = [
    (Mutant(LogProbsAtTemperatureOne), "log probs are the trainers"),
    (Mutant(LogProbsAfterTruncation), "log probs are those before truncation"),
    (Mutant(DrawsAtHalfTheTemperature), "temperature shapes the frequencies"),
    (Mutant(DrawsDependOnTheBatch), "the same request gets the same tokens in any batch"),
    (Mutant(DrawsAtThePositionInTheResponse), "a draw depends on the absolute position"),
    (Mutant(DecodePositionsOffByOne), "log probs are the trainers"),
    (Mutant(PaddingLeaksIntoShortPrompts), "greedy decoding equals transformers generate"),
    (Mutant(StopStringsWithinOneTokenOnly), "the token that completes a stop string is the last"),
    (Mutant(EndTokenGoesUnnoticed), "the end token ends a response unless ignored"),
    (Mutant(VersionStaysBehind), "every token carries the version it was drawn with"),
    (Mutant(EveryPromptComputedAnew), "a groups prompt is computed once"),
    (Mutant(engine=SeedIgnored), "different seeds differ and the same seed repeats"),
    (Mutant(engine=TopKIgnored), "top k keeps the k likeliest"),
    (Mutant(engine=TopPIgnored), "top p keeps the smallest set that reaches p"),
    (Mutant(engine=MinPIgnored), "min p keeps what is likely beside the likeliest"),
    (Mutant(engine=IgnoreEosIgnored), "the end token ends a response unless ignored"),
    (Mutant(engine=OneTokenTooMany), "max tokens ends a response with reason length"),
    (Mutant(engine=GreedyIsSampled), "greedy decoding equals transformers generate"),
    (Mutant(engine=StopTokenDropped), "a stop token is the last token"),
    (Mutant(engine=PromptEchoed), "the prompt is not echoed"),
    (Mutant(engine=AbortForgetsWhatWasSaid), "abort ends the named requests alone"),
    (Mutant(engine=AbortEndsEveryRequest), "abort ends the named requests alone"),
    (Mutant(engine=AbortLeavesTheQueueRunning), "abort ends the named requests alone"),
    (Mutant(AbortMovesNoSlot), "abort ends the named requests alone"),
    (Mutant(LongestFirst), "the lowest priority starts first and ties by arrival"),
    (Mutant(TiesStartInReverse), "the lowest priority starts first and ties by arrival"),
    (
        Mutant(CommitKeepsOldKeys),
        "after a commit kept requests attend only to keys of the new weights",
    ),
    (
        Mutant(ParkedRequestsStartAgain),
        "after a commit kept requests attend only to keys of the new weights",
    ),
    (
        Mutant(engine=SleepRefusesKeptRequests),
        "sleep keeps the tokens of kept requests and not their keys",
    ),
    (
        Mutant(engine=SleepKeepsTheCache),
        "sleep keeps the tokens of kept requests and not their keys",
    ),
    (
        Mutant(engine=PauseEndsWhatItShouldKeep),
        "kept requests go on after the parameters have moved",
    ),
    (Mutant(engine=AbortHoldsNewRequests), "abort of all leaves the engine open"),
    (Mutant(engine=PauseDoesNotHoldNewRequests), "pause ends what runs and holds what comes"),
    (Mutant(engine=ResumeDropsWhatWasHeld), "pause ends what runs and holds what comes"),
    (Mutant(engine=PauseEndsWhatItShouldKeep), "pause with keep goes on where it stood"),
    (Mutant(engine=PauseGoesOnDecoding), "pause with keep goes on where it stood"),
    (Mutant(engine=PauseForgetsKeys), "pause with keep goes on where it stood"),
    (Mutant(engine=StreamsNothing), "tokens are streamed as they are drawn"),
    (Mutant(engine=StreamsTheFirstTokensTwice), "tokens are streamed as they are drawn"),
    (
        Mutant(engine=ErrorsOfOnTokensEndEveryRequest),
        "an error of on tokens ends its own request",
    ),
    (Mutant(engine=HalfAnUpdateIsUsed), "half an update is never asked for tokens"),
    (Mutant(engine=UpdatesNeedNoBeginning), "an update is begun before it goes on"),
    (
        Mutant(engine=UpdatesUnderRunningRequests),
        "an update waits for requests that are not paused",
    ),
    (Mutant(engine=WeightsAreDropped), "new weights are used from the next token"),
    (Mutant(engine=UnknownWeightsAreSkipped), "weights with unknown names are refused"),
    (Mutant(engine=SleepKeepsTheCache), "sleep gives memory back and waking restores"),
    (Mutant(engine=FailuresAreSwallowed), "an error in any phase reaches every waiter"),
    (Mutant(engine=FailuresReachTheQueuesOnly), "an error in any phase reaches every waiter"),
    (Mutant(engine=CloseForgetsWaiters), "closing leaves nobody waiting"),
    (Mutant(engine=EmptyPromptsAreFilled), "a wrong request fails alone with a sentence"),
]
