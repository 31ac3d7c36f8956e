"""The groups that the trainer sends to the loop runners of the ranks, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class FinishedGroup:
    """The trajectories of one group."""

    number: int
    row_indices: tuple[int, ...]  # per output, the index of its row in the group
    outputs: tuple[AgentLoopOutput, ...]  # at least one output per row, in row order
