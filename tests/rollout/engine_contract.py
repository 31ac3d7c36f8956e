"""The rollout contract, executable: named clauses, each a function of an engine factory.

`violations(factory)` runs those that apply and names the broken ones. The clauses stand in three
files: what a model must say, how tokens are drawn, and how requests begin and end.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from hone.models.policy import PolicyModel
from hone.rollout.contract import RolloutEngine, Sampling, TokenOutput

T = TypeVar("T")
DEADLINE_S = 120.0
"""No clause may wait longer: a hang is a violation too."""
HOLD_S = 0.2
"""How long a clause looks whether a request stays unanswered."""


Place = tuple[Any, str]
"""An object and the name of a method of it."""


class Factory(ABC):
    """Builds one kind of engine, and knows how to look inside where a clause must."""

    name: str
    traits: frozenset[str] = frozenset()
    """`model`: decodes with a policy; `seeds`: draws; `prefill`, `memory`: can be probed."""

    draws: int = 800
    """Draws for the clauses about frequencies; fewer where one is slow."""

    @abstractmethod
    def build(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> RolloutEngine: ...

    def prefilled_tokens(self, engine: Any) -> int:
        raise NotImplementedError

    def held_bytes(self, engine: Any) -> int:
        raise NotImplementedError

    @abstractmethod
    def phases(self, engine: Any) -> dict[str, Place]:
        """Where the engine's work on a request can be made to raise, by the name of the phase."""

    @contextmanager
    def engine(self, policy: PolicyModel, *, max_num_seqs: int = 64) -> Iterator[RolloutEngine]:
        engine = self.build(policy, max_num_seqs=max_num_seqs)
        try:
            yield engine
        finally:
            engine.close()


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
    """Run a coroutine with the contract's deadline."""

    async def limited() -> T:
        return await asyncio.wait_for(work, DEADLINE_S)

    return asyncio.run(limited())


def ask_all(
    engine: RolloutEngine, prompts: Sequence[Sequence[int]], sampling: Sequence[Sampling]
) -> list[TokenOutput]:
    """All requests at once; outputs in their order."""

    async def gather() -> list[TokenOutput]:
        jobs: list[Awaitable[TokenOutput]] = [
            engine.generate(p, s, f"r{i}")
            for i, (p, s) in enumerate(zip(prompts, sampling, strict=True))
        ]
        return list(await asyncio.gather(*jobs))

    return play(gather())


def ask(engine: RolloutEngine, prompt: Sequence[int], sampling: Sampling) -> TokenOutput:
    return ask_all(engine, [prompt], [sampling])[0]
