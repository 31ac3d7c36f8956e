"""The agent-loop contract: a loop is `async run(sampling_params, **row) -> AgentLoopOutput`.

Single-turn is the trivial loop, so everything goes one way. A loop sees a small client of the rollout
engine and token ids; text it has generated is never tokenised again.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from hone.config import PPOTrainerConfig
from hone.data.prompts import render_prompt
from hone.plugins import Table
from hone.rollout.contract import OnTokens, RolloutEngine, Sampling, TokenOutput

LOOPS = Table(
    "agent loop",
    {
        "single_turn_agent": "hone.agents.loops.single_turn:SingleTurnAgentLoop",
        "tool_agent": "hone.agents.loops.tool:ToolAgentLoop",
    },
)


@dataclass
class AgentLoopMetrics:
    """Seconds and counts of one trajectory."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    num_preempted: int = 0


@dataclass
class AgentLoopOutput:
    """One trajectory: `response_mask` is 1 where the policy wrote, 0 for tool and environment tokens."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    response_logprobs: Sequence[float] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics | Mapping[str, Any] = field(default_factory=AgentLoopMetrics)
    multi_modal_data: Mapping[str, Any] | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)
    versions: Sequence[int] | None = None
    stop_reason: str | None = None


class ServerManager:
    """What one trajectory sees of the engine: `generate`, with the trajectory's own seed filled in."""

    def __init__(self, engine: RolloutEngine, *, seed: int, max_tokens: int) -> None:
        self._engine = engine
        self._seed = seed
        self._max_tokens = max_tokens

    async def generate(
        self,
        request_id: str | None = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Any = None,
        video_data: Any = None,
        on_tokens: OnTokens | None = None,
    ) -> TokenOutput:
        """One completion; `on_tokens` sees its tokens as they are drawn."""
        sampling = Sampling.from_mapping(
            sampling_params, max_tokens=self._max_tokens, seed=self._seed
        )
        media = {k: v for k, v in (("image", image_data), ("video", video_data)) if v}
        return await self._engine.generate(
            prompt_ids,
            sampling,
            request_id or uuid4().hex,
            on_tokens=on_tokens,
            multi_modal_data=media or None,
        )


class AgentLoopBase(ABC):
    """Base of every loop; a new instance is made for each trajectory."""

    def __init__(
        self,
        trainer_config: PPOTrainerConfig | Any,
        server_manager: ServerManager,
        tokenizer: Any,
        processor: Any = None,
        **kwargs: Any,
    ) -> None:
        config = getattr(trainer_config, "config", trainer_config)
        self.config = config
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.prompt_length: int = config.actor_rollout_ref.rollout.prompt_length
        self.response_length: int = config.actor_rollout_ref.rollout.response_length
        self.loop = asyncio.get_event_loop()

    def prompt_ids(self, row: Mapping[str, Any], tools: Any = None) -> list[int]:
        """The row's prompt as token ids: as the data set made them, or rendered with `tools`."""
        ready = row.get("prompt_ids")
        if ready is not None and not tools:
            return list(ready)
        data = self.config.data
        return render_prompt(
            row["raw_prompt"],
            self.tokenizer,
            prompt_format=data.prompt_format,
            tools=tools,
            template_kwargs=data.apply_chat_template_kwargs,
        )

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Make one trajectory from one row; `kwargs` are the row's columns."""


def register(name: str) -> Any:
    """Decorator: make a loop known under the name that rows carry in `agent_name`."""
    return LOOPS.register(name)


def register_agent_loop(name: str, loop: type[AgentLoopBase]) -> None:
    """Make a loop known under a name."""
    LOOPS.add(name, loop)
