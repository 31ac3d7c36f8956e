"""The contract between a worker group and whatever runs its ranks.

Two crews keep it: one in this process and one over Ray. Leaves out dispatch: a crew is told what
each rank gets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hone.types import Settings

Handle = TypeVar("Handle")
"""What a crew gives for a call under way."""


@dataclass(frozen=True)
class Call:
    """One method call on one rank."""

    role: str
    """Which of the colocated workers; empty where there is one."""
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Settings = field(default_factory=dict)


class Crew(ABC, Generic[Handle]):
    """The running ranks of one group of processes."""

    world_size: int

    @abstractmethod
    def submit(self, rank: int, call: Call) -> Handle:
        """Start a call; return a handle at once."""

    @abstractmethod
    def resolver(self, owner: str, method: str) -> Callable[[Sequence[Handle]], list[Any]]:
        """A picklable function that waits for handles, with a deadline, and says who waits."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop all ranks and give back what they held; a second time does nothing."""
