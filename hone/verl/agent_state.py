"""verl's states of the tool loop, which hone's loop does not have."""

from __future__ import annotations

from enum import Enum


class AgentState(Enum):
    """verl's states of a trajectory, for code that imports them."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"
    INTERACTING = "interacting"
