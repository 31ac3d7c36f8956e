"""The thread that drives the native engine: cancelled requests, and control calls during decoding."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from hone import event_loop
from hone.agents import loop_thread
from hone.agents.loop_thread import run_with_engine
from hone.rollout.contract import RolloutError, Sampling, StopReason, TokenOutput

from ..engine_contract import play, update
from ..factories import NativeFactory, slow_motion
from ..models import policy, prompts
from .paged import PagedFactory

PROMPT = prompts(1, 6, 6)[0]
LONG = Sampling(900, 1.0, 1, ignore_eos=True)


def halted_under_way(engine: Any) -> threading.Event:
    """An event that is set when the next request has a token; after this token the core samples no other."""
    step, event, steps = engine._core.step, threading.Event(), 0

    def two_steps(should_return: Any) -> list[Any]:
        nonlocal steps
        if steps == 2:
            event.set()
            time.sleep(0.001)
            return []
        steps += 1
        return step(should_return)

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
            with slow_motion():
                some = asyncio.Event()
                job = asyncio.create_task(
                    engine.generate(PROMPT, LONG, "long", on_tokens=lambda delta: some.set())
                )
                await some.wait()
                job.cancel()
                await asyncio.gather(job, return_exceptions=True)
            return await engine.generate(PROMPT, Sampling(2, 1.0, 0, ignore_eos=True), "short")

        steps = 0
        core: Any = engine._core  # type: ignore[attr-defined]
        step = core.step

        def counted(should_return: Any) -> list[Any]:
            nonlocal steps
            steps += 1
            return step(should_return)

        core.step = counted
        assert len(play(replaced()).token_ids) == 2
        assert steps < LONG.max_tokens


def test_sleep_is_refused_while_requests_run() -> None:
    with NativeFactory().engine(policy()) as engine:

        async def sleepy() -> None:
            in_progress = halted_under_way(engine)
            job = asyncio.create_task(engine.generate(PROMPT, LONG, "long"))
            await until(in_progress)
            try:
                with pytest.raises(RolloutError, match="cannot sleep while requests run"):
                    await engine.sleep()
            finally:
                await engine.abort()
            assert (await job).token_ids
            await engine.sleep()

        play(sleepy())


def test_sleep_is_refused_for_a_request_that_has_only_arrived() -> None:
    with NativeFactory().engine(policy(), driven=False) as engine:

        async def sleepy() -> TokenOutput:
            job = asyncio.create_task(engine.generate(PROMPT, LONG, "long"))
            await asyncio.sleep(0.01)
            try:
                with pytest.raises(RolloutError, match="cannot sleep while requests run"):
                    await engine.sleep()
            finally:
                await engine.abort()
            return await job

        assert play(sleepy()).stop_reason is StopReason.ABORT


def test_weights_change_between_steps_never_within_one() -> None:
    """The versions of the tokens of a request never decrease, and each version has its own weights."""
    with NativeFactory().engine(policy()) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]
        step, steps = core.step, 0

        def last_tokens_wait_for_the_last_weights(should_return: Any) -> list[Any]:
            nonlocal steps
            if steps > LONG.max_tokens // 2 and core.version < 3:
                time.sleep(0.001)
                return []
            steps += 1
            return step(should_return)

        core.step = last_tokens_wait_for_the_last_weights

        async def updated() -> TokenOutput:
            job = asyncio.create_task(engine.generate(PROMPT, LONG, "long"))
            for version in range(1, 4):
                await asyncio.sleep(0.01)
                await engine.pause(keep=True)
                await update(engine, policy(seed=version).lm.named_parameters(), version)
                await engine.resume()
            return await job

        out = play(updated())
    assert out.versions == sorted(out.versions)
    assert out.versions[-1] == 3
    assert len(out.token_ids) == LONG.max_tokens


def test_two_event_loops_one_after_the_other_share_an_engine() -> None:
    with NativeFactory().engine(policy()) as engine:
        few = Sampling(3, 1.0, 0)
        assert play(engine.generate(PROMPT, few, "a")) == play(engine.generate(PROMPT, few, "b"))


def test_the_driving_thread_decodes_and_loops_run_in_another() -> None:
    with NativeFactory().engine(policy(), driven=False) as engine:
        threads: dict[str, str] = {}
        core: Any = engine._core  # type: ignore[attr-defined]
        step = core.step

        def watched(should_return: Any) -> list[Any]:
            threads["decode"] = threading.current_thread().name
            return step(should_return)

        async def loop() -> TokenOutput:
            threads["loop"] = threading.current_thread().name
            return await engine.generate(PROMPT, Sampling(4, 1.0, 0, ignore_eos=True), "one")

        core.step = watched
        for _ in range(2):
            assert len(run_with_engine(engine, loop()).token_ids) == 4
    assert threads == {"decode": threading.current_thread().name, "loop": "hone-loops"}


def test_the_callers_thread_answers_as_another_does() -> None:
    async def both() -> list[list[int]]:
        jobs = (
            engine.generate(PROMPT, Sampling(9, 1.0, s, ignore_eos=True), str(s)) for s in (1, 2)
        )
        return [out.token_ids for out in await asyncio.gather(*jobs)]

    answers = []
    for driven in (False, True):
        with NativeFactory().engine(policy(), driven=driven) as engine:
            answers.append(play(both()) if driven else run_with_engine(engine, both()))
    assert answers[0] == answers[1]


def test_what_a_loop_raised_is_raised_and_the_engine_answers_again() -> None:
    with NativeFactory().engine(policy(), driven=False) as engine:

        async def broken() -> None:
            job = asyncio.create_task(engine.generate(PROMPT, LONG, "left behind"))
            await asyncio.sleep(0.01)
            raise LookupError(f"a loop's own error, {job.done()=}")

        with pytest.raises(LookupError, match="a loop's own error"):
            run_with_engine(engine, broken())
        few = Sampling(3, 1.0, 0, ignore_eos=True)
        out = run_with_engine(engine, engine.generate(PROMPT, few, "next"))
        assert len(out.token_ids) == 3


def test_loops_get_the_cause_that_stopped_decoding() -> None:
    with NativeFactory().engine(policy(), driven=False) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]
        core.step = raising(RuntimeError("boom"))
        with pytest.raises(RolloutError, match="decoding stopped: RuntimeError: boom"):
            run_with_engine(engine, engine.generate(PROMPT, LONG, "doomed"))


@pytest.mark.parametrize("verb", ["sleep", "wake_up", "begin_update"])
def test_a_failed_engine_says_so_and_why(verb: str) -> None:
    with NativeFactory().engine(policy(), driven=False) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]
        core.step = raising(RuntimeError("boom"))
        with pytest.raises(RolloutError, match="boom"):
            run_with_engine(engine, engine.generate(PROMPT, LONG, "doomed"))
        with pytest.raises(RolloutError, match=r"failed earlier \(RuntimeError: boom\)"):
            play(getattr(engine, verb)())
        play(engine.abort())
        play(engine.resume())


def test_an_interrupt_of_the_decoding_caller_ends_the_loops_and_stays_one() -> None:
    ended: list[str] = []
    with NativeFactory().engine(policy(), driven=False) as engine:
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
            run_with_engine(engine, loop())
    assert ended == ["cleaned up"]


def test_a_loop_that_does_not_end_after_a_failure_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_thread, "LOOPS_GRACE_S", 0.05)
    with NativeFactory().engine(policy(), driven=False) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]
        core.step = raising(RuntimeError("boom"))

        async def waits_for_ever() -> None:
            asks = engine.generate(PROMPT, LONG, "one")
            await asyncio.gather(asks, return_exceptions=True)
            await asyncio.Event().wait()

        with pytest.raises(RolloutError, match="the agent loops did not end"):
            run_with_engine(engine, waits_for_ever())


def test_a_core_that_loses_a_request_is_found_out() -> None:
    with NativeFactory().engine(policy()) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]

        def forgets(should_return: Any) -> list[Any]:
            core._waiting.abort(None)
            return []

        core.step = forgets
        with pytest.raises(RolloutError, match="lost 1 requests"):
            play(engine.generate(PROMPT, LONG, "lost"))


def test_two_threads_cannot_drive_one_engine() -> None:
    with NativeFactory().engine(policy()) as engine:
        native: Any = engine
        with pytest.raises(RolloutError, match="another thread already drives"):
            native.drive(lambda: True)


def test_an_ended_loop_is_not_waited_for_and_a_blocked_one_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_loop, "_SUBMIT_TIMEOUT_S", 0.05)
    released = threading.Event()

    async def blocks() -> None:
        released.wait(60)

    loops = event_loop.LoopThread(blocks(), lambda: None)
    loops.start()
    loops.wait_for_requests()
    assert "blocked its event loop" in caplog.text
    caplog.clear()
    released.set()
    assert loops.wait(60)
    loops.wait_for_requests()
    assert not caplog.text


@pytest.mark.parametrize("caller", ["abort", "request"])
def test_chunks_that_follow_each_other_end_for_a_call_or_a_request(caller: str) -> None:
    with PagedFactory().engine(policy()) as engine:
        core: Any = engine._core  # type: ignore[attr-defined]
        decode, in_progress, chunks = core._decode, threading.Event(), 0

        def second_meets_a_caller(steps: int) -> None:
            nonlocal chunks
            chunks += 1
            if chunks == 2:
                in_progress.set()
                while not (engine._control_lock.locked() or engine._arrivals):  # type: ignore[attr-defined]
                    time.sleep(0.001)
            decode(steps)

        core._decode = second_meets_a_caller

        async def interrupted() -> tuple[TokenOutput, bool]:
            job = asyncio.create_task(engine.generate(PROMPT, LONG, "long"))
            await until(in_progress)
            if caller == "abort":
                await engine.abort()
            else:
                await engine.generate(PROMPT, Sampling(2, 1.0, 0, ignore_eos=True), "short")
            ended = job.done()
            return await job, ended

        out, ended_first = play(interrupted())
    if caller == "abort":
        assert out.stop_reason is StopReason.ABORT
        assert 0 < len(out.token_ids) < LONG.max_tokens
    else:
        assert not ended_first
        assert len(out.token_ids) == LONG.max_tokens
