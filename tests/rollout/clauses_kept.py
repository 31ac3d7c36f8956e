"""Requests that an engine keeps over a commit, moved parameters or a sleep, and the order of their start."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from .clauses_control import Watched, long
from .engine_contract import Factory, clause, play
from .models import policy, prompts

PROMPTS = prompts(5, 4, 9, seed=11)


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
                running = [Watched(engine, PROMPTS[4], long(factory), f"{i}") for i in range(slots)]
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
