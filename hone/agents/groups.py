"""The groups that the trainer sends to the loop runners of the ranks, and what returns."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from hone.agents.contract import AgentLoopOutput
from hone.types import Row, Settings


@dataclass(frozen=True)
class GroupRequest:
    """The rows of one prompt, one per sample."""

    number: int
    """The group's number, unique among the groups that a runner has."""
    rows: tuple[Row, ...]
    samplings: tuple[Settings, ...]
    """The sampling parameters of each row."""
    priority: int = 0
    """Waiting requests of the lowest priority start first."""


@dataclass(frozen=True)
class FinishedGroup:
    """The trajectories of one group."""

    number: int
    row_indices: tuple[int, ...]  # per output, the index of its row in the group
    outputs: tuple[AgentLoopOutput, ...]  # at least one output per row, in row order


@dataclass(eq=False)
class RunningGroup:
    """A group in a runner, from its submission until it is returned or aborted."""

    request: GroupRequest
    outputs: dict[int, Sequence[AgentLoopOutput]] = field(default_factory=dict)
    """The outputs of each row that has ended, by the row's index."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)  # used in the event loop only
    is_aborted: bool = False
