"""The rollout contract, executable: named clauses, each a function of an engine factory.

`violations(factory)` runs those that apply and names the broken ones. The clauses stand in three
files: what a model must say, how tokens are drawn, and how requests begin and end.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from torch import Tensor

from hone.agents.loop_thread import run_with_engine
from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutEngine, Sampling, TokenOutput, Traits, is_driven

T = TypeVar("T")
DEADLINE_S = 120.0
"""The longest wait of a clause; a hang is a violation too."""
HOLD_S = 0.2
"""Seconds for which a clause checks that a request gets no answer."""


Place = tuple[Any, str]
"""An object and the name of one of its methods."""


class Factory(ABC):
    """Builds one kind of engine, and has the probes that clauses need."""

    name: str
    engine_traits: Traits
    probes: frozenset[str] = frozenset()
    """`model`: decodes with a policy; `prefill`, `memory`: can be looked at; `bits`: log-probs have the
    same bits in any batch; `queue`: at most `max_num_seqs` requests run at once."""
    smallest_queue: int = 1
    """The smallest `max_num_seqs` that the engine keeps."""
    long_tokens: int = 250
    """Length of a request that must still run when it is tested; less for slow engines."""

    draws: int = 800
    """Number of samples of the clauses about frequencies; less for slow engines."""

    is_slow: bool = False
    """Whether its contract tests are in the slow lane."""

    @property
    def traits(self) -> set[str]:
        """The names that clauses may require: probes and traits."""
        own = {name for name, has in vars(self.engine_traits).items() if has}
        return {*self.probes, *own, *(() if self.engine_traits.multi_modal else ("text_only",))}

    @abstractmethod
    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine: ...

    def prefilled_tokens(self, engine: Any) -> int:
        raise NotImplementedError

    def held_bytes(self, engine: Any) -> int:
        raise NotImplementedError

    def decoding_policy(self, engine: Any, policy: PolicyModel) -> PolicyModel:
        """Returns the module that the engine decodes with, if it uses a module."""
        return policy

    def slow_motion(self) -> AbstractContextManager[None]:
        """Slows sampling down in the block, so that a call reaches a long request before its end."""
        return nullcontext()

    @abstractmethod
    def phases(self, engine: Any) -> dict[str, Place]:
        """Returns the methods that a test can make raise, by the name of the phase."""

    @contextmanager
    def engine(
        self, policy: PolicyModel, *, max_num_seqs: int = 64, driven: bool = True
    ) -> Iterator[RolloutEngine]:
        """Yields an engine; a thread drives an engine that must be driven, unless `driven` is False."""
        engine = self.build(policy, max_num_seqs=max_num_seqs)
        try:
            with driving(engine) if driven else nullcontext():
                yield engine
        finally:
            asyncio.run(engine.close())


@contextmanager
def driving(engine: RolloutEngine) -> Iterator[None]:
    """Drives a `DrivenEngine` in a thread while the block runs."""
    if not is_driven(engine):
        yield
        return
    ended = threading.Event()
    driver = threading.Thread(target=engine.drive, args=(ended.is_set,), daemon=True)
    driver.start()
    try:
        yield
    finally:
        ended.set()
        engine.notify()
        driver.join(DEADLINE_S)


@dataclass(frozen=True)
class Clause:
    name: str
    check: Callable[[Factory], None]
    needs: frozenset[str]

    def applies(self, factory: Factory) -> bool:
        return self.needs <= factory.traits


class Violation(AssertionError):
    """A clause was broken; the message begins with its name."""


CLAUSES: dict[str, Clause] = {}


def clause(*needs: str) -> Callable[[Callable[[Factory], None]], Callable[[Factory], None]]:
    """Decorator: the function's name, read as a sentence, names the clause."""

    def decorate(check: Callable[[Factory], None]) -> Callable[[Factory], None]:
        name = check.__name__.replace("_", " ")
        CLAUSES[name] = Clause(name, check, frozenset(needs))
        return check

    return decorate


def verify(name: str, factory: Factory) -> None:
    """Run one clause; raises `Violation` with its name."""
    try:
        CLAUSES[name].check(factory)
    except asyncio.TimeoutError as error:
        raise Violation(f"{name}: nothing came back in time") from error
    except (Exception, pytest.fail.Exception) as error:
        raise Violation(f"{name}: {type(error).__name__}: {error}") from error


def violations(factory: Factory) -> list[str]:
    """Names of the broken clauses."""
    broken = []
    for name, item in CLAUSES.items():
        if item.applies(factory):
            try:
                verify(name, factory)
            except Violation:
                broken.append(name)
    return broken


def play(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine with the contract's deadline, while another thread drives the engine."""
    return asyncio.run(_limited(work))


def drive(engine: RolloutEngine, work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine with the contract's deadline, and drives the engine in this thread."""
    return run_with_engine(engine, _limited(work))


async def _limited(work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.wait_for(work, DEADLINE_S)


async def update(
    engine: RolloutEngine, weights: Iterable[tuple[str, Tensor]], version: int
) -> None:
    """Updates all weights, in two calls of `load`."""
    await engine.begin_update()
    tensors = list(weights)
    for part in (tensors[:1], tensors[1:]):
        if part:
            await engine.load(part)
    await engine.commit(version)


def ask_all(
    engine: RolloutEngine, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]
) -> list[TokenOutput]:
    """Issues all requests at once and returns their outputs in order; drives the engine if no thread does."""

    async def gather() -> list[TokenOutput]:
        jobs: list[Awaitable[TokenOutput]] = [
            engine.generate(p, s, f"r{i}")
            for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))
        ]
        return list(await asyncio.gather(*jobs))

    return play(gather()) if getattr(engine, "_is_driven", False) else drive(engine, gather())


def ask(engine: RolloutEngine, prompt: Sequence[int], sampling: Sampling) -> TokenOutput:
    return ask_all(engine, [prompt], [sampling])[0]
