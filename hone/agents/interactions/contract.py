"""The interaction contract: a simulated user replies to model turns and may end the trajectory."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from hone.types import Fields, JsonValue, Settings

Messages = list[Fields]


class BaseInteraction:
    """Base class of interactions; one object serves all trajectories, which have different instance ids."""

    def __init__(self, config: Settings) -> None:
        self.config = dict(config)
        self.name: str = self.config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Starts a conversation; `kwargs` are the row's `interaction_kwargs`."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: Messages, **kwargs: JsonValue
    ) -> tuple[bool, str, float, Fields]:
        """Returns (whether to end, reply, score of the turn, metrics) after a model turn."""
        raise NotImplementedError(f"{type(self).__name__} does not implement generate_response")

    async def calculate_score(self, instance_id: str, **kwargs: JsonValue) -> float:
        """Returns the score of the finished conversation."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: JsonValue) -> None:
        """Releases the conversation's state."""
