"""The native engine's thread: cancelled waiters, control calls while it decodes."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenOutput
from hone.rollout.native import engine as native_engine

from ..engine_contract import play
from ..factories import NativeFactory
from ..models import policy, prompts
from .paged import PagedFactory

PROMPT = prompts(1, 6, 6)[0]
LONG = Sampling(900, 1.0, 1, ignore_eos=True)


def halted_under_way(engine: Any) -> threading.Event:
    """Is set when the next request has a token, and then none gets another: it never ends by itself."""
    step, event, steps = engine._core.step, threading.Event(), 0

    def two_steps(wanted: Any) -> list[Any]:
        nonlocal steps
        if steps == 2:
            event.set()
            time.sleep(0.001)
            return []
        steps += 1
        return step(wanted)

    engine._core.step = two_steps
    return event


def raising(error: BaseException) -> Any:
    def fail(*_: Any) -> Any:
        raise error

    return fail


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 60)


def test_a_cancelled_waiter_frees_its_slot() -> None:
    with NativeFactory().engine(policy(), max_num_seqs=1) as engine:

        async def replaced() -> TokenOutput:
            job = asyncio.create_task(engine.generate(PROMPT, LONG, "long"))
            await asyncio.sleep(0.02)
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
            return await engine.generate(PROMPT, Sampling(2, 1.0, 0, ignore_eos=True), "short")

        steps = 0
        core: Any = engine._core  # type: ignore[attr-defined]
        step = core.step

        def counted(wanted: Any) -> list[Any]:
            nonlocal steps
            steps += 1
            return step(wanted)

        core.step = counted
        assert len(play(replaced()).token_ids) == 2
        assert steps < LONG.max_tokens


def test_sleep_is_refused_while_requests_run() -> None:
    with NativeFactory().engine(policy()) as engine:

        async def sleepy() -> None:
            under_way = halted_under_way(engine)
            job = asyncio.create_task(engine.generate(PROMPT, LONG, "long"))
            await until(under_way)
            try:
                with pytest.raises(RolloutError, match="abort them first"):
                    engine.sleep()
            finally:
                engine.abort()
            assert (await job).token_ids
            engine.sleep()
            engine.resume()

        play(sleepy())


def test_sleep_is_refused_for_a_request_that_has_only_arrived() -> None:
    with NativeFactory().engine(policy()) as engine:
        engine._driven = True  # type: ignore[attr-defined]  # nobody decodes

        async def sleepy() -> TokenOutput:
            job = asyncio.create_task(engine.generate(PROMPT, LONG, "long"))
            await asyncio.sleep(0.01)
            try:
                with pytest.raises(RolloutError, match="abort them first"):
                    engine.sleep()
            finally:
                engine.abort()
            return await job

        assert play(sleepy()).stop_reason is StopReason.ABORT


def test_weights_change_between_steps_never_within_one() -> None:
    """Each token's version never goes back, and the tensors travel with it."""
    with NativeFactory().engine(policy()) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]
        step, steps = core.step, 0

        def last_tokens_wait_for_the_last_weights(wanted: Any) -> list[Any]:
            nonlocal steps
            if steps > LONG.max_tokens // 2 and core.version < 3:
                time.sleep(0.001)
                return []
            steps += 1
            return step(wanted)

        core.step = last_tokens_wait_for_the_last_weights

        async def updated() -> TokenOutput:
            job = asyncio.create_task(engine.generate(PROMPT, LONG, "long"))
            for version in range(1, 4):
                await asyncio.sleep(0.01)
                engine.update_weights(policy(seed=version).lm.named_parameters(), version)
            return await job

        out = play(updated())
    assert out.versions == sorted(out.versions)
    assert out.versions[-1] == 3
    assert len(out.token_ids) == LONG.max_tokens


def test_two_event_loops_one_after_the_other_share_an_engine() -> None:
    with NativeFactory().engine(policy()) as engine:
        few = Sampling(3, 1.0, 0)
        assert play(engine.generate(PROMPT, few, "a")) == play(engine.generate(PROMPT, few, "b"))


def test_play_decodes_in_the_callers_thread() -> None:
    with NativeFactory().engine(policy()) as engine:
        threads: dict[str, str] = {}
        core: Any = engine._core  # type: ignore[attr-defined]
        step = core.step

        def watched(wanted: Any) -> list[Any]:
            threads["decode"] = threading.current_thread().name
            return step(wanted)

        async def loop() -> TokenOutput:
            threads["loop"] = threading.current_thread().name
            return await engine.generate(PROMPT, Sampling(4, 1.0, 0, ignore_eos=True), "one")

        core.step = watched
        for _ in range(2):
            assert len(engine.play(loop()).token_ids) == 4
    assert threads == {"decode": threading.current_thread().name, "loop": "hone-loops"}


def test_play_answers_as_a_thread_of_its_own_does() -> None:
    async def both() -> list[list[int]]:
        jobs = (
            engine.generate(PROMPT, Sampling(9, 1.0, s, ignore_eos=True), str(s)) for s in (1, 2)
        )
        return [out.token_ids for out in await asyncio.gather(*jobs)]

    answers = []
    for run in (lambda e, work: e.play(work), lambda e, work: play(work)):
        with NativeFactory().engine(policy()) as engine:
            answers.append(run(engine, both()))
    assert answers[0] == answers[1]


def test_play_raises_what_a_loop_raised_and_plays_again() -> None:
    with NativeFactory().engine(policy()) as engine:

        async def broken() -> None:
            job = asyncio.create_task(engine.generate(PROMPT, LONG, "left behind"))
            await asyncio.sleep(0.01)
            raise LookupError(f"a loop's own error, {job.done()=}")

        with pytest.raises(LookupError, match="a loop's own error"):
            engine.play(broken())
        out = engine.play(engine.generate(PROMPT, Sampling(3, 1.0, 0, ignore_eos=True), "next"))
        assert len(out.token_ids) == 3


def test_play_tells_the_loops_why_decoding_stopped() -> None:
    with NativeFactory().engine(policy()) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]
        core.step = raising(RuntimeError("boom"))
        with pytest.raises(RolloutError, match="decoding stopped: RuntimeError: boom"):
            engine.play(engine.generate(PROMPT, LONG, "doomed"))


@pytest.mark.parametrize("verb", ["sleep", "wake_up"])
def test_a_failed_engine_says_so_and_why(verb: str) -> None:
    with NativeFactory().engine(policy()) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]
        core.step = raising(RuntimeError("boom"))
        with pytest.raises(RolloutError, match="boom"):
            engine.play(engine.generate(PROMPT, LONG, "doomed"))
        with pytest.raises(RolloutError, match=r"failed earlier \(RuntimeError: boom\)"):
            getattr(engine, verb)()
        engine.abort()
        engine.resume()


def test_an_interrupt_of_the_decoding_caller_ends_the_loops_and_stays_one() -> None:
    ended: list[str] = []
    with NativeFactory().engine(policy()) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]
        core.step = raising(KeyboardInterrupt())

        async def loop() -> None:
            try:
                await asyncio.gather(
                    engine.generate(PROMPT, LONG, "one"),
                    asyncio.Event().wait(),
                    return_exceptions=True,
                )
            finally:
                ended.append("cleaned up")

        with pytest.raises(KeyboardInterrupt):
            engine.play(loop())
    assert ended == ["cleaned up"]


def test_a_loop_that_does_not_end_after_a_failure_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_engine, "_LOOPS_GRACE_S", 0.05)
    with NativeFactory().engine(policy()) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]
        core.step = raising(RuntimeError("boom"))

        async def waits_for_ever() -> None:
            asks = engine.generate(PROMPT, LONG, "one")
            await asyncio.gather(asks, return_exceptions=True)
            await asyncio.Event().wait()

        with pytest.raises((asyncio.CancelledError, RolloutError)):
            engine.play(waits_for_ever())


def test_a_core_that_loses_a_request_is_found_out() -> None:
    with NativeFactory().engine(policy()) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]

        def forgets(wanted: Any) -> list[Any]:
            core._waiting.clear()
            return []

        core.step = forgets
        with pytest.raises(RolloutError, match="lost 1 requests"):
            play(engine.generate(PROMPT, LONG, "lost"))


def test_a_request_that_comes_as_play_ends_is_answered() -> None:
    answers: list[TokenOutput] = []
    few = Sampling(3, 1.0, 0, ignore_eos=True)
    with NativeFactory().engine(policy()) as engine:
        native: Any = engine
        decode = native._decode

        def ask() -> None:
            answers.append(play(engine.generate(PROMPT, few, "beside")))

        beside = threading.Thread(target=ask, daemon=True)

        def decodes_then_meets_a_request(until: Any = lambda: False) -> None:
            decode(until)
            if native._driven:
                beside.start()
                while not native._inbox:
                    time.sleep(0.001)

        native._decode = decodes_then_meets_a_request
        engine.play(engine.generate(PROMPT, few, "first"))
        beside.join(60)
    assert len(answers) == 1


def test_a_thread_that_cannot_start_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with NativeFactory().engine(policy()) as engine:
        monkeypatch.setattr(
            engine, "_start_thread", raising(RuntimeError("can't start new thread"))
        )
        with pytest.raises(RolloutError, match="can't start new thread"):
            play(engine.generate(PROMPT, LONG, "one"))


def test_a_loop_that_closed_counts_as_settled_and_a_blocked_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_engine, "_SETTLE_TIMEOUT_S", 0.05)
    loop, never, settled = asyncio.new_event_loop(), threading.Event(), threading.Event()
    settled.set()
    assert native_engine._has_settled(loop, settled)
    assert not native_engine._has_settled(loop, never)
    loop.close()
    assert native_engine._has_settled(loop, never)


@pytest.mark.parametrize("who", ["abort", "request"])
def test_chunks_that_follow_each_other_end_for_whoever_comes(who: str) -> None:
    with PagedFactory().engine(policy()) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]
        decode, under_way, chunks = core._decode, threading.Event(), 0

        def second_meets_somebody(steps: int) -> None:
            nonlocal chunks
            chunks += 1
            if chunks == 2:
                under_way.set()
                while not (engine._submit_lock.locked() or engine._inbox):  # type: ignore[attr-defined]
                    time.sleep(0.001)
            decode(steps)

        core._decode = second_meets_somebody

        async def interrupted() -> tuple[TokenOutput, bool]:
            job = asyncio.create_task(engine.generate(PROMPT, LONG, "long"))
            await until(under_way)
            if who == "abort":
                await asyncio.to_thread(engine.abort)
            else:
                await engine.generate(PROMPT, Sampling(2, 1.0, 0, ignore_eos=True), "short")
            ended = job.done()
            return await job, ended

        out, ended_first = play(interrupted())
    if who == "abort":
        assert out.stop_reason is StopReason.ABORT
        assert 0 < len(out.token_ids) < LONG.max_tokens
    else:
        assert not ended_first
        assert len(out.token_ids) == LONG.max_tokens
