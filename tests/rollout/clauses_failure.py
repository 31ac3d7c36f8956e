"""After an error inside an engine, every request ends with the cause, and nothing waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hone.agents.loop_thread import run_with_engine
from hone.rollout.contract import RolloutEngine, RolloutError, Sampling, TokenOutput

from . import engine_contract
from .engine_contract import Factory, Place, clause, drive, play
from .models import policy, prompts

Answers = list[TokenOutput | BaseException]
PROMPTS = prompts(5, 4, 9, seed=3)
FEW = Sampling(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)


class Boom(Exception):
    """The error that tests raise inside an engine."""


@contextmanager
def broken(place: Place, nth: int, error: BaseException) -> Iterator[None]:
    """Makes the method raise from its nth call on."""
    owner, name = place
    original, calls = getattr(owner, name), 0

    def raising(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= nth:
            raise error
        return original(*arguments, **options)

    setattr(owner, name, raising)
    try:
        yield
    finally:
        setattr(owner, name, original)


async def generate_all(engine: RolloutEngine, name: str) -> Answers:
    """Issues five requests at once; the engine has fewer slots."""
    jobs = [engine.generate(p, FEW, f"{name}{i}") for i, p in enumerate(PROMPTS)]
    return list(await asyncio.gather(*jobs, return_exceptions=True))


def together(*works: Callable[[], Answers]) -> Answers:
    """Runs each function in a thread of its own; returns the results within the contract's deadline."""
    answers: list[Answers | None] = [None] * len(works)

    def run(index: int) -> None:
        try:
            answers[index] = works[index]()
        except Exception as error:
            answers[index] = [error]

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(engine_contract.DEADLINE_S)
    missing = [i for i, thread_answers in enumerate(answers) if thread_answers is None]
    assert not missing, f"event loops {missing} never ended"
    return [answer for thread_answers in answers for answer in thread_answers or []]


def ended_with_cause(answers: Answers, where: str, *, first: bool) -> None:
    """Checks that every request failed with the cause; requests may have ended before a late error."""
    for answer in answers:
        if isinstance(answer, TokenOutput) and not first:
            continue
        assert isinstance(answer, RolloutError), f"{where}: a request ended as {answer!r}"
        assert "boom" in str(answer), f"{where}: {answer}"
        assert answer.__cause__ is not None, f"{where}: the cause is lost"


def check(
    factory: Factory, ask_all: Callable[[RolloutEngine], Answers], *, driven: bool = True
) -> None:
    model = policy()
    with factory.engine(model) as engine:
        names = list(factory.phases(engine))
    for name in names:
        for nth in (1, 3):
            where = f"{name}, call {nth}"
            with factory.engine(model, max_num_seqs=2, driven=driven) as engine:
                with broken(factory.phases(engine)[name], nth, Boom("boom")):
                    ended_with_cause(ask_all(engine), where, first=nth == 1)
                    work = generate_all(engine, "later")
                    later = play(work) if driven else drive(engine, work)
                    ended_with_cause(later, f"{where}, afterwards", first=True)


@clause()
def an_error_in_any_phase_reaches_every_waiter(factory: Factory) -> None:
    """The requests come from several event loops and are in different phases."""
    check(
        factory,
        lambda engine: together(
            lambda: play(generate_all(engine, "a")), lambda: play(generate_all(engine, "b"))
        ),
    )


@clause()
def an_error_in_any_phase_reaches_the_loops_of_the_driving_thread(factory: Factory) -> None:
    """Requests from another event loop get the error too."""

    def both(engine: RolloutEngine) -> Answers:
        ended = threading.Event()

        async def end_of_the_other() -> None:
            while not ended.is_set():
                await asyncio.sleep(0.001)

        def driver() -> Answers:
            answers = run_with_engine(engine, generate_all(engine, "a"))
            run_with_engine(engine, end_of_the_other())
            return answers

        def other() -> Answers:
            try:
                return play(generate_all(engine, "b"))
            finally:
                ended.set()

        return together(driver, other)

    check(factory, both, driven=False)


@clause("model")
def no_memory_for_a_prompt_reaches_every_waiter(factory: Factory) -> None:
    error = torch.OutOfMemoryError("boom: CUDA out of memory")
    with factory.engine(policy(), max_num_seqs=2, driven=False) as engine:
        phases = factory.phases(engine)
        with broken(phases.get("prefill") or phases["forward"], 1, error):
            answers = together(lambda: run_with_engine(engine, generate_all(engine, "a")))
    ended_with_cause(answers, "prefill", first=True)
    assert all(isinstance(a, RolloutError) and a.__cause__ is error for a in answers)


@clause()
def requests_beside_a_driving_thread_that_leaves_wait_for_the_next(factory: Factory) -> None:
    """The driving thread decodes for both event loops, and ends before them."""
    long = Sampling(max_tokens=300, temperature=1.0, seed=1, ignore_eos=True)
    running, asked_beside = threading.Event(), threading.Event()
    with factory.engine(policy(), max_num_seqs=2, driven=False) as engine:

        async def first() -> Answers:
            running.set()
            while not asked_beside.is_set():
                await asyncio.sleep(0.001)
            return [await engine.generate(PROMPTS[0], FEW, "first")]

        async def second() -> Answers:
            job = asyncio.create_task(engine.generate(PROMPTS[1], long, "second"))
            await asyncio.sleep(0.01)
            asked_beside.set()
            return [await job]

        def driver() -> Answers:
            answers = run_with_engine(engine, first())
            return answers + run_with_engine(engine, generate_all(engine, "third"))

        def beside() -> Answers:
            running.wait(engine_contract.DEADLINE_S)
            return play(second())

        def later() -> None:
            with engine_contract.driving(engine):
                thread.join(engine_contract.DEADLINE_S)

        answers: Answers = []
        thread = threading.Thread(target=lambda: answers.extend(together(beside)), daemon=True)
        thread.start()
        later_answers = together(driver)
        later()
    assert [len(a.token_ids) for a in later_answers if isinstance(a, TokenOutput)] == [12] * 6
    assert [len(a.token_ids) for a in answers if isinstance(a, TokenOutput)] == [300]
