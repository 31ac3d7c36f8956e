"""Checks that may refuse a run before its models load; the trainer collects their problems.

A check yields all its problems, and never stops at the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, TypeAlias

if TYPE_CHECKING:
    from hone.config import PPOTrainerConfig
    from hone.trainer.ppo.plan import Plan


@dataclass(frozen=True)
class Facts:
    """What checks may ask about a run."""

    config: PPOTrainerConfig
    plan: Plan | None
    """None if the configuration has no valid plan, which is a problem of its own."""


@dataclass(frozen=True)
class Problem:
    """One reason why a run cannot start."""

    error: Exception

    def throw(self) -> NoReturn:
        """Raises the error."""
        raise self.error


Check: TypeAlias = Callable[[Facts], Iterator[Problem]]


def problems_of(action: Callable[[], object]) -> Iterator[Problem]:
    """Yields the error of `action` as a problem."""
    try:
        action()
    except Exception as error:  # the collector raises what is no user error
        yield Problem(error)
