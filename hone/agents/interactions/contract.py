"""The interaction contract: a simulated user that answers the model's turns and may end the talk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

Messages = list[dict[str, Any]]


class BaseInteraction:
    """Base of every interaction. One object serves all trajectories, told apart by `instance_id`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.name: str = self.config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin; `kwargs` are the row's `interaction_kwargs`."""
        return instance_id or uuid4().hex

    async def generate_response(
        self, instance_id: str, messages: Messages, **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """After a model turn: (end here, what the user says, score of the turn, facts to keep)."""
        raise NotImplementedError(
            f"{type(self).__name__} does not say what the user answers (generate_response)"
        )

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The talk's score, asked at its end."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the talk."""
