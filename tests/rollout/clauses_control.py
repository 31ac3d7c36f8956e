"""Control calls and streaming: abort, pause, resume and weight updates while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hone.rollout.contract import (
    RolloutEngine,
    RolloutError,
    Sampling,
    StopReason,
    TokenDelta,
    TokenOutput,
)

from . import engine_contract
from .engine_contract import Factory, ask, ask_all, clause, play, update
from .models import policy, prompts

SHORT = Sampling(max_tokens=60, temperature=1.0, seed=1, ignore_eos=True)
PROMPT = prompts(1, 7, 7, seed=9)[0]
OTHERS = prompts(3, 4, 9, seed=10)


def long(factory: Factory) -> Sampling:
    """Returns the sampling parameters of a request that still runs when the test acts on it."""
    return replace(SHORT, max_tokens=factory.long_tokens)


class Watched:
    """A request whose tokens are counted as they are sampled."""

    def __init__(self, engine: RolloutEngine, prompt: Sequence[int], sampling: Sampling, name: str):
        self.deltas: list[TokenDelta] = []
        self._some = asyncio.Event()
        self.job = asyncio.create_task(
            engine.generate(prompt, sampling, name, on_tokens=self._count)
        )

    def _count(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)
        self._some.set()

    @property
    def num_tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas)

    async def settled(self) -> None:
        """Waits for tokens that were sampled before the pause and are not delivered yet."""
        previous = -1
        for _ in range(20):
            if previous == self.num_tokens:
                return
            previous = self.num_tokens
            await asyncio.sleep(0.05)

    async def in_progress(self) -> None:
        await asyncio.wait_for(self._some.wait(), engine_contract.DEADLINE_S)


def matches(
    factory: Factory, out: TokenOutput, uninterrupted: TokenOutput, *, until: int | None = None
) -> None:
    """Checks that tokens and log-probs are equal; with the probe `bits`, log-probs have the same bits."""
    assert out.token_ids[:until] == uninterrupted.token_ids[:until]
    if "bits" in factory.probes:
        assert out.log_probs[:until] == uninterrupted.log_probs[:until]
    else:
        assert out.log_probs[:until] == pytest.approx(uninterrupted.log_probs[:until], abs=1e-4)


@clause()
def every_token_carries_the_version_it_was_drawn_with(factory: Factory) -> None:
    with factory.engine(policy()) as engine:
        for version in (0, 4, 5):
            play(update(engine, (), version))
            assert engine.version == version
            out = ask(engine, PROMPT, Sampling(5, 1.0, version, ignore_eos=True))
            assert out.versions == [version] * 5


@clause()
def tokens_are_streamed_as_they_are_drawn(factory: Factory) -> None:
    sampling = long(factory)
    with factory.engine(policy()) as engine:

        async def streamed() -> tuple[TokenOutput, list[TokenDelta], int]:
            with factory.slow_motion():
                watched = Watched(engine, PROMPT, sampling, "streamed")
                beside = asyncio.create_task(engine.generate(OTHERS[0], SHORT, "beside"))
                await watched.in_progress()
                early = watched.num_tokens
            await beside
            return await watched.job, watched.deltas, early

        out, deltas, early = play(streamed())
        alone = ask(engine, PROMPT, sampling)
    assert len(out.token_ids) == sampling.max_tokens > early, "the first delta held all of it"
    for name in ("token_ids", "log_probs", "versions"):
        assert [x for delta in deltas for x in getattr(delta, name)] == getattr(out, name)
    matches(factory, out, alone)


@clause()
def an_error_of_on_tokens_ends_its_own_request(factory: Factory) -> None:
    def wrong(delta: TokenDelta) -> None:
        raise LookupError("the callers own")

    with factory.engine(policy()) as engine:

        async def both() -> list[TokenOutput | BaseException]:
            jobs = (
                engine.generate(PROMPT, SHORT, "wrong", on_tokens=wrong),
                engine.generate(PROMPT, SHORT, "good"),
            )
            return list(await asyncio.gather(*jobs, return_exceptions=True))

        failed, good = play(both())
    assert isinstance(failed, LookupError)
    assert isinstance(good, TokenOutput)
    assert len(good.token_ids) == SHORT.max_tokens


@clause()
def abort_ends_the_named_requests_alone(factory: Factory) -> None:
    """Other requests continue with the same bits, and new requests run at once."""
    sampling = long(factory)
    with factory.engine(policy(), max_num_seqs=3) as engine:
        alone = ask_all(engine, OTHERS, [sampling] * 3)

        async def interrupted() -> tuple[TokenOutput, TokenOutput, list[TokenOutput]]:
            with factory.slow_motion():
                first = Watched(engine, PROMPT, sampling, "first")
                others = [
                    asyncio.create_task(engine.generate(p, sampling, f"other {i}"))
                    for i, p in enumerate(OTHERS)
                ]
                waits = asyncio.create_task(engine.generate(PROMPT, sampling, "waits for a slot"))
                await first.in_progress()
                await engine.abort({"first", "waits for a slot", "nobody"})
            return await first.job, await waits, list(await asyncio.gather(*others))

        ended, waited, others = play(interrupted())
        assert 0 < len(ended.token_ids) < sampling.max_tokens, "the tokens drawn before are lost"
        assert len(ended.token_ids) == len(ended.log_probs) == len(ended.versions)
        assert ended.stop_reason is waited.stop_reason is StopReason.ABORT
        for out, uninterrupted in zip(others, alone, strict=True):
            assert out.stop_reason is StopReason.LENGTH
            matches(factory, out, uninterrupted)
        again = ask(engine, PROMPT, replace(sampling, max_tokens=len(ended.token_ids)))
    matches(factory, ended, again)


@clause()
def abort_of_all_leaves_the_engine_open(factory: Factory) -> None:
    sampling = long(factory)
    with factory.engine(policy()) as engine:

        async def interrupted() -> list[TokenOutput]:
            with factory.slow_motion():
                first = Watched(engine, PROMPT, sampling, "first")
                await first.in_progress()
                just_asked = asyncio.create_task(engine.generate(PROMPT, sampling, "just asked"))
                await asyncio.sleep(0)
                await engine.abort()
            later = await engine.generate(PROMPT, SHORT, "later")
            return [await first.job, await just_asked, later]

        first, just_asked, later = play(interrupted())
    assert first.stop_reason is just_asked.stop_reason is StopReason.ABORT
    assert len(later.token_ids) == SHORT.max_tokens


async def _while_paused(
    factory: Factory,
    engine: RolloutEngine,
    sampling: Sampling,
    keep: bool,
    change: Callable[[], Coroutine[Any, Any, None]],
) -> tuple[TokenOutput, int, TokenOutput]:
    """Pauses running requests, checks that no token is sampled, calls a function, and resumes."""
    with factory.slow_motion():
        running = Watched(engine, PROMPT, sampling, "running")
        await running.in_progress()
        await engine.pause(keep)
    late = asyncio.create_task(engine.generate(PROMPT, SHORT, "late"))
    await running.settled()
    num_tokens = running.num_tokens
    done, _ = await asyncio.wait([late], timeout=engine_contract.HOLD_S)
    assert not done, "a request was answered between pause and resume"
    assert num_tokens == running.num_tokens, "tokens were drawn"
    assert running.job.done() == (not keep)
    await change()
    await engine.resume()
    return await running.job, num_tokens, await late


async def _nothing() -> None: ...


@clause()
def pause_ends_what_runs_and_holds_what_comes(factory: Factory) -> None:
    sampling = long(factory)
    with factory.engine(policy()) as engine:
        uninterrupted = ask(engine, PROMPT, sampling)
        out, _, late = play(_while_paused(factory, engine, sampling, False, _nothing))
    assert out.stop_reason is StopReason.ABORT
    assert 0 < len(out.token_ids) == len(out.log_probs) == len(out.versions) < sampling.max_tokens
    matches(factory, out, uninterrupted, until=len(out.token_ids))
    matches(factory, late, uninterrupted, until=SHORT.max_tokens)
    assert late.stop_reason is StopReason.LENGTH


@clause("pause_keeps_requests")
def pause_with_keep_goes_on_where_it_stood(factory: Factory) -> None:
    sampling = long(factory)
    with factory.engine(policy()) as engine:
        uninterrupted = ask(engine, PROMPT, sampling)
        out, num_tokens, late = play(_while_paused(factory, engine, sampling, True, _nothing))
    assert out.stop_reason is StopReason.LENGTH
    assert len(out.token_ids) == sampling.max_tokens
    matches(
        factory,
        out,
        uninterrupted,
        until=None if "samples_by_position" in factory.traits else num_tokens,
    )
    matches(factory, late, uninterrupted, until=SHORT.max_tokens)


@clause("pause_keeps_requests")
def a_kept_request_takes_new_weights_from_its_next_token(factory: Factory) -> None:
    sampling = long(factory)
    with factory.engine(policy()) as engine:
        uninterrupted = ask(engine, PROMPT, sampling)

        async def change() -> None:
            await update(engine, policy(seed=1).lm.named_parameters(), 3)

        out, num_tokens, late = play(_while_paused(factory, engine, sampling, True, change))
    assert out.versions == [0] * num_tokens + [3] * (sampling.max_tokens - num_tokens)
    assert 0 < num_tokens < sampling.max_tokens
    matches(factory, out, uninterrupted, until=num_tokens)
    if "model" in factory.traits:
        assert out.token_ids != uninterrupted.token_ids, "the old weights were used"
    assert late.versions == [3] * SHORT.max_tokens


@clause()
def half_an_update_is_never_asked_for_tokens(factory: Factory) -> None:
    weights = list(policy(seed=1).lm.named_parameters())
    with factory.engine(policy()) as engine:
        play(engine.begin_update())
        for stage in (weights[:2], weights[2:]):
            play(engine.load(stage))
            with pytest.raises(RolloutError, match="between begin_update and commit"):
                play(engine.generate(PROMPT, SHORT, "too early"))
        with pytest.raises(RolloutError, match="between begin_update and commit"):
            play(engine.resume())
        play(engine.commit(2))
        assert ask(engine, PROMPT, SHORT).versions == [2] * SHORT.max_tokens


@clause()
def an_update_is_begun_before_it_goes_on(factory: Factory) -> None:
    with factory.engine(policy()) as engine:
        for verb in (engine.load(()), engine.commit(1)):
            with pytest.raises(RolloutError, match="without begin_update"):
                play(verb)
        assert ask(engine, PROMPT, SHORT).versions == [0] * SHORT.max_tokens


@clause()
def an_update_waits_for_requests_that_are_not_paused(factory: Factory) -> None:
    sampling = long(factory)
    with factory.engine(policy()) as engine:

        async def beside() -> TokenOutput:
            with factory.slow_motion():
                running = Watched(engine, PROMPT, sampling, "running")
                await running.in_progress()
                with pytest.raises(RolloutError, match="begin_update while 1 requests run"):
                    await engine.begin_update()
            return await running.job

        assert play(beside()).versions == [0] * sampling.max_tokens
