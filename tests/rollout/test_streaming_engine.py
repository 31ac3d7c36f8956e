"""Streams that break off, end too early or send invalid tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import replace
from typing import Any

import pytest

from hone.ops.counter_rng import fold_seed
from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenOutput, Traits
from hone.rollout.requests import Chunk, ConnectionLost, Request, RequestRules
from hone.rollout.streaming_engine import StreamingEngine

FIVE = Sampling(max_tokens=5, temperature=1.0, seed=7, ignore_eos=True)


class Counting(StreamingEngine):
    """Each token is its position; after the tokens in the script, a stream raises the error in the script."""

    name = "counting"
    traits = Traits(uses_policy_module=False)

    def __init__(self, *script: tuple[int, BaseException | None]) -> None:
        super().__init__(RequestRules(frozenset(), vocab_size=100))
        self.script, self.streams, self.recovered = list(script), [], 0  # type: ignore[var-annotated]

    async def _backend_stream(
        self, request: Request, sampling: Sampling
    ) -> AsyncGenerator[Chunk, None]:
        self.streams.append((request.length, sampling.max_tokens, sampling.seed))
        count, error = self.script.pop(0) if self.script else (sampling.max_tokens, None)
        for _ in range(count):
            yield Chunk([request.length], [-0.5])
            await asyncio.sleep(0)
        if error is not None:
            raise error

    async def _backend_recover(self, error: ConnectionLost) -> None:
        self.recovered += 1


def generate(engine: StreamingEngine, sampling: Sampling = FIVE, **options: Any) -> TokenOutput:
    async def streams() -> TokenOutput:
        try:
            return await engine.generate([1, 2, 3], sampling, "one", **options)
        finally:
            await engine.close()

    return asyncio.run(streams())


def test_a_broken_stream_is_issued_again_with_its_tokens_in_the_prompt() -> None:
    engine = Counting((2, ConnectionLost("reset")), (1, ConnectionLost("reset again")))
    deltas: list[int] = []
    out = generate(engine, on_tokens=lambda delta: deltas.extend(delta.token_ids))
    assert out.token_ids == deltas == [3, 4, 5, 6, 7]
    assert out.stop_reason is StopReason.LENGTH
    assert engine.streams == [(3, 5, 7), (5, 3, 7), (6, 2, 7)]
    assert engine.recovered == 2


def test_a_continuation_gets_a_seed_of_its_own_where_draws_are_not_positional() -> None:
    engine = Counting((2, ConnectionLost("reset")))
    engine.traits = Traits(uses_policy_module=False, samples_by_position=False)
    generate(engine)
    assert engine.streams == [(3, 5, 7), (5, 3, fold_seed(7, 2))]


def test_a_request_whose_streams_always_break_fails_with_the_last_reason() -> None:
    engine = Counting(*[(0, ConnectionLost("reset"))] * 9)
    with pytest.raises(RolloutError, match=r"request one: its stream broke off 4 times.*reset"):
        generate(engine)
    assert len(engine.streams) == 4


def test_a_stream_that_ends_without_a_reason_is_continued() -> None:
    assert generate(Counting((2, None))).token_ids == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        (Chunk([1, 2], [-0.5]), "2 tokens with 1 log-probs"),
        (Chunk([100], [-0.5]), "token id 100"),
        (Chunk([-1], [-0.5]), "token id -1"),
        (Chunk([1.5], [-0.5]), "token id 1.5"),  # type: ignore[list-item]
        (Chunk([1], [float("nan")]), "nan as log-prob"),
        (Chunk([1], [float("-inf")]), "-inf as log-prob"),
        (Chunk([1], [0.5]), "0.5 as log-prob"),
        (Chunk([1], [None]), "None as log-prob"),  # type: ignore[list-item]
        (Chunk([1], [-0.5], finished=True), "ended it at token 1"),
    ],
)
def test_nonsense_fails_its_request_in_one_sentence(chunk: Chunk, words: str) -> None:
    class Wrong(Counting):
        async def _backend_stream(
            self, request: Request, sampling: Sampling
        ) -> AsyncGenerator[Chunk, None]:
            yield chunk

    with pytest.raises(RolloutError, match=words) as caught:
        generate(Wrong())
    assert "request one" in str(caught.value)


def test_tokens_after_the_end_are_dropped() -> None:
    class Talks(Counting):
        async def _backend_stream(
            self, request: Request, sampling: Sampling
        ) -> AsyncGenerator[Chunk, None]:
            yield Chunk([4, 5, 6, 7, 8, 9, 10], [-0.5] * 7)

    assert generate(Talks()).token_ids == [4, 5, 6, 7, 8]


def test_a_refused_commit_needs_a_new_update() -> None:
    class Refuses(Counting):
        async def _load(self, weights: Iterable[Any]) -> None: ...

        async def _backend_commit(self, version: int) -> None:
            raise RolloutError("success=false")

    async def update() -> None:
        engine = Refuses()
        await engine.begin_update()
        with pytest.raises(RolloutError, match="success=false"):
            await engine.commit(1)
        assert engine.version == 0
        with pytest.raises(RolloutError, match="half of the new weights"):
            await engine.generate([1], FIVE, "early")
        with pytest.raises(RolloutError, match="the update has failed"):
            await engine.commit(1)
        await engine.close()

    asyncio.run(update())


def test_an_abort_comes_before_tokens_that_wait_in_a_buffer() -> None:
    class Buffered(Counting):
        async def _backend_stream(
            self, request: Request, sampling: Sampling
        ) -> AsyncGenerator[Chunk, None]:
            while True:  # never waits, like a stream that has received all tokens
                yield Chunk([5], [-0.5])
                time.sleep(1e-4)

    async def work() -> TokenOutput:
        engine, some = Buffered(), asyncio.Event()
        many = replace(FIVE, max_tokens=2**40)
        job = asyncio.create_task(
            engine.generate([1], many, "many", on_tokens=lambda delta: some.set())
        )
        await some.wait()
        await engine.abort()
        out = await job
        await engine.close()
        return out

    out = asyncio.run(work())
    assert out.stop_reason is StopReason.ABORT
    assert len(out) > 0


@pytest.mark.parametrize("verb", ["sleep", "begin_update"])
def test_a_request_that_was_just_cancelled_is_waited_for(verb: str) -> None:
    """The server ends the request late, and the next call must wait for this end."""

    class EndsLate(Counting):
        may_end = ended = False

        async def _backend_stream(
            self, request: Request, sampling: Sampling
        ) -> AsyncGenerator[Chunk, None]:
            try:
                yield Chunk([5], [-0.5])
                await asyncio.sleep(3600)
            finally:
                while not self.may_end:
                    await asyncio.sleep(0.001)
                self.ended = True

    async def work() -> None:
        engine, some = EndsLate(), asyncio.Event()
        job = asyncio.create_task(
            engine.generate([1], FIVE, "leaves", on_tokens=lambda delta: some.set())
        )
        await some.wait()
        job.cancel()
        await asyncio.wait({job})
        call = asyncio.create_task(getattr(engine, verb)())
        await asyncio.wait({call}, timeout=0.05)
        assert not call.done()
        engine.may_end = True
        await call
        assert engine.ended
        await engine.close()

    asyncio.run(work())


def test_an_abort_between_a_loss_and_its_recovery_waits_for_no_recovery() -> None:
    class Lost(Counting):
        async def _backend_stream(
            self, request: Request, sampling: Sampling
        ) -> AsyncGenerator[Chunk, None]:
            yield Chunk([5], [-0.5])
            await self.abort()
            raise ConnectionLost("reset")

    engine = Lost()
    out = generate(engine)
    assert out.stop_reason is StopReason.ABORT
    assert out.token_ids == [5]
    assert engine.recovered == 0


def test_a_request_that_close_cancels_before_its_start_does_not_wait_for_ever() -> None:
    class Closes(Counting):
        async def _serve(self, request: Request) -> None:
            self._closed = True
            raise asyncio.CancelledError

    async def ask() -> None:
        with pytest.raises(RolloutError, match="is closed"):
            await asyncio.wait_for(Closes().generate([1], FIVE, "late"), 60)

    asyncio.run(ask())
