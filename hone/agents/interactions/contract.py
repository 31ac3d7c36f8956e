"""The interaction contract: a simulated user that answers the model's turns and may end the talk."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from hone.types import JsonValue, Row, Settings

Messages = list[Row]


class BaseInteraction:
    """Base of every interaction. One object serves all trajectories, told apart by `instance_id`."""

    def __init__(self, config: Settings) -> None:
        self.config = dict(config)
        self.name: str = self.config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin; `kwargs` are the row's `interaction_kwargs`."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: Messages, **kwargs: JsonValue
    ) -> tuple[bool, str, float, Row]:
        """After a model turn: (end here, what the user says, score of the turn, facts to keep)."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what the user answers (generate_response)"
        )

    async def calculate_score(self, instance_id: str, **kwargs: JsonValue) -> float:
        """The talk's score, asked at its end."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: JsonValue) -> None:
        """Forget the talk."""
