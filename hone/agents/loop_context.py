"""What an agent loop has beyond verl's names, on one object, so that a subclass may use any name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import uuid4

from hone.data.messages import Message
from hone.data.prompt_ids import render_prompt
from hone.types import Row, Settings

if TYPE_CHECKING:
    from hone.agents.contract import AgentLoopBase
    from hone.config.data import DataConfig


@dataclass(eq=False)
class LoopContext:
    """The prompts, limits and checks of one agent loop."""

    loop: AgentLoopBase
    request_id: str = field(default_factory=lambda: uuid4().hex)
    """The loop runner sets the row's `trajectory_id`."""
    problems: Callable[[], Iterable[str]] = tuple
    """Returns messages about problems with which the loop would fail; called before training."""

    @property
    def dataset_config(self) -> DataConfig:
        return self.loop.data_config

    @property
    def prompt_length(self) -> int:
        return self.loop.rollout_config.prompt_length

    @property
    def response_length(self) -> int:
        return self.loop.rollout_config.response_length

    def response_limit(self, prompt_tokens: int) -> int:
        """Returns the maximum number of response tokens, observations included."""
        return self.loop.rollout_config.response_limit(prompt_tokens)

    def prompt_ids(self, row: Row, tools: Sequence[Settings] | None = None) -> list[int]:
        """Returns the prompt's token ids: the row's `prompt_ids`, or with `tools` a new rendering."""
        ids = row.get("prompt_ids")
        if ids is not None and not tools:
            return list(ids)
        return self.render(row["raw_prompt"], tools)

    def render(self, prompt: str | list[Message], tools: Sequence[Settings] | None) -> list[int]:
        """Returns the token ids of a prompt."""
        return render_prompt(
            prompt,
            self.loop.tokenizer,
            prompt_format=self.loop.data_config.get("prompt_format", "chat"),
            tools=tools,
            template_kwargs=self.loop.apply_chat_template_kwargs,
        )
