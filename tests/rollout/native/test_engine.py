"""The native engine's thread: cancelled waiters, control calls while it decodes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hone.rollout.contract import RolloutError, Sampling, TokenOutput

from ..engine_contract import play
from ..factories import NativeFactory
from ..models import policy, prompts

PROMPT = prompts(1, 6, 6)[0]
LONG = Sampling(900, 1.0, 1, ignore_eos=True)


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

        def counted() -> list[Any]:
            nonlocal steps
            steps += 1
            return step()

        core.step = counted
        assert len(play(replaced()).token_ids) == 2
        assert steps < LONG.max_tokens


def test_sleep_is_refused_while_requests_run() -> None:
    with NativeFactory().engine(policy()) as engine:

        async def sleepy() -> None:
            job = asyncio.create_task(engine.generate(PROMPT, LONG, "long"))
            await asyncio.sleep(0.02)
            try:
                with pytest.raises(RolloutError, match="abort them first"):
                    engine.sleep()
            finally:
                engine.abort()
            assert (await job).token_ids
            engine.sleep()
            engine.resume()

        play(sleepy())


def test_weights_change_between_steps_never_within_one() -> None:
    """Each token's version never goes back, and the tensors travel with it."""
    with NativeFactory().engine(policy()) as engine:

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
