"""Requests that an engine keeps over a commit, moved parameters or a sleep, and the order of their start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch

from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutEngine, StopReason, TokenOutput

from .clauses_control import Watched, long, matches
from .engine_contract import Factory, ask_all, clause, play, update
from .models import policy, prompts, trainer_log_probs

PROMPTS = prompts(5, 4, 9, seed=11)
GROUP = [PROMPTS[0], *prompts(1, 40, 40, seed=12) * 2]
"""A short prompt, and two samples of one that fills blocks of the prefix cache."""


async def kept(
    factory: Factory, engine: RolloutEngine, change: Callable[[], Coroutine[Any, Any, None]]
) -> tuple[list[TokenOutput], list[int]]:
    """Pauses the requests of `GROUP`, calls a function, and resumes.

    Returns the outputs, and the number of tokens that each request had when the function was called.
    """
    with factory.slow_motion():
        running = [
            Watched(engine, prompt, replace(long(factory), seed=i), f"kept {i}")
            for i, prompt in enumerate(GROUP)
        ]
        for one in running:
            await one.in_progress()
        await engine.pause(keep=True)
    for one in running:
        await one.settled()
    counts = [one.num_tokens for one in running]
    await change()
    await engine.resume()
    outputs = [await one.job for one in running]
    assert all(0 < n < len(out) for n, out in zip(counts, outputs, strict=True))
    assert {out.stop_reason for out in outputs} == {StopReason.LENGTH}
    return outputs, counts


def uninterrupted(factory: Factory) -> list[TokenOutput]:
    with factory.engine(policy()) as engine:
        return ask_all(engine, GROUP, [replace(long(factory), seed=i) for i in range(len(GROUP))])


def move(model: PolicyModel) -> None:
    """Moves the parameters to other memory; what still reads the old memory computes NaN."""
    for parameter in model.parameters():
        old = parameter.data
        parameter.data = old.clone()
        old.fill_(torch.nan)


@clause("model", "pause_keeps_requests")
def after_a_commit_kept_requests_attend_only_to_keys_of_the_new_weights(factory: Factory) -> None:
    old, new = policy(), policy(seed=1)
    with factory.engine(policy()) as engine:

        async def change() -> None:
            await update(engine, new.lm.named_parameters(), 3)

        outputs, counts = play(kept(factory, engine, change))
    for prompt, out, n in zip(GROUP, outputs, counts, strict=True):
        assert out.versions == [0] * n + [3] * (len(out) - n)
        for weights, part in ((old, slice(n)), (new, slice(n, None))):
            expected = trainer_log_probs(weights, prompt, out.token_ids, 1.0)
            assert out.log_probs[part] == pytest.approx(expected[part], abs=1e-4)


@clause("pause_keeps_requests")
def kept_requests_go_on_after_the_parameters_have_moved(factory: Factory) -> None:
    model = policy()
    with factory.engine(model) as engine:

        async def change() -> None:
            move(factory.decoding_policy(engine, model))
            await engine.wake_up()

        outputs, counts = play(kept(factory, engine, change))
    until = None if "samples_by_position" in factory.traits else min(counts)
    for out, expected in zip(outputs, uninterrupted(factory), strict=True):
        matches(factory, out, expected, until=until)


@clause("pause_keeps_requests")
def sleep_keeps_the_tokens_of_kept_requests_and_not_their_keys(factory: Factory) -> None:
    """The parameters move while the engine sleeps."""
    model = policy()
    with factory.engine(model) as engine:

        async def change() -> None:
            await engine.sleep()
            if "memory" in factory.traits:
                assert factory.held_bytes(engine) == 0
            move(factory.decoding_policy(engine, model))
            await engine.wake_up()

        outputs, counts = play(kept(factory, engine, change))
    until = None if "samples_by_position" in factory.traits else min(counts)
    for out, expected in zip(outputs, uninterrupted(factory), strict=True):
        assert out.token_ids[:until] == expected.token_ids[:until]
        # Keys that are computed again have other roundings.
        assert out.log_probs[:until] == pytest.approx(expected.log_probs[:until], abs=1e-4)


@clause("queue", "orders_by_priority")
def the_lowest_priority_starts_first_and_ties_by_arrival(factory: Factory) -> None:
    """The lowest priority has the shortest response, as a late turn of an old group has."""
    arrivals = [(3, 5), (7, 6), (3, 9), (-1, 4)]  # (priority, max_tokens)
    slots = factory.smallest_queue
    with factory.engine(policy(), max_num_seqs=slots) as engine:

        async def started() -> list[int]:
            order: list[int] = []

            async def ask(index: int) -> None:
                priority, max_tokens = arrivals[index]
                await engine.generate(
                    PROMPTS[index],
                    replace(long(factory), max_tokens=max_tokens),
                    f"waits {index}",
                    priority=priority,
                    on_tokens=lambda _: None if index in order else order.append(index),
                )

            with factory.slow_motion():
                # The first ends before the others, so that one slot serves the waiting requests in turn.
                longer = replace(long(factory), max_tokens=factory.long_tokens + 60)
                running = [
                    Watched(engine, PROMPTS[4], longer if i else long(factory), f"{i}")
                    for i in range(slots)
                ]
                for one in running:
                    await one.in_progress()
                jobs = []
                for index in range(len(arrivals)):
                    jobs.append(asyncio.create_task(ask(index)))
                    await asyncio.sleep(0.05)  # a server reads each before the next
                assert not order, "no slot was free"
            await asyncio.gather(*jobs, *(one.job for one in running))
            return order

        assert play(started()) == [3, 0, 2, 1]
