"""verl's states of the tool loop, and its trajectory with verl's constructor and fields."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import groupby
from typing import Any

from hone.agents import agent_data
from hone.agents.contract import AgentLoopOutput
from hone.agents.interactions.contract import BaseInteraction
from hone.agents.parsers.contract import FunctionCall
from hone.data.messages import Message
from hone.types import Fields, Settings


class AgentState(Enum):
    """The states of a trajectory."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"
    INTERACTING = "interacting"


class AgentData(agent_data.AgentData):
    """A trajectory whose lists of tokens a state may also extend itself."""

    def __init__(
        self,
        messages: list[Message],
        image_data: Sequence[Any] | None,
        video_data: Sequence[Any] | None,
        metrics: dict[str, Any],
        request_id: str,
        tools_kwargs: Settings,
        interaction: BaseInteraction | None = None,
        interaction_kwargs: Settings | None = None,
    ) -> None:
        super().__init__(messages, [], request_id, tools_kwargs)
        self.image_data, self.video_data = image_data, video_data
        self.metrics = metrics
        """verl's seconds `generate_sequences` and `tool_calls`, added to ours in the output."""
        self.interaction = interaction
        self.interaction_kwargs = dict(interaction_kwargs or {})
        self.tool_calls: list[FunctionCall] = []
        self.sessions: Any = None  # of a loop whose `run` is a subclass's own

    def complete(self) -> None:
        """Completes what a state that extended the lists itself has left out."""
        if sum(turn["tokens"] for turn in self.turn_spans) != len(self.response_mask):
            self.turn_spans[:] = [
                {"role": "assistant" if mask else "tool", "tokens": len([*run]), "mask": int(mask)}
                for mask, run in groupby(map(bool, self.response_mask))
            ]
        for name, key in (("model", "generate_sequences"), ("tools", "tool_calls")):
            self.seconds[name] += self.metrics.get(key) or 0.0
        self.num_preempted += max(self.metrics.get("num_preempted") or 0, 0)

    def to_output(self, extra_fields: Fields) -> AgentLoopOutput:
        output = super().to_output(extra_fields)
        if output.versions is not None and len(output.versions) != len(self.response_mask):
            output.versions = None
        output.response_logprobs = output.response_logprobs or None
        return output
