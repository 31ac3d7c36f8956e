"""A user who asks for the weather and is content once a tool was asked. A row: `{name: weather, query}`."""

from __future__ import annotations

from hone.agents.interactions.contract import BaseInteraction, Messages
from hone.types import JsonValue, Row, Settings


class WeatherInteraction(BaseInteraction):
    """Ends the talk after one turn, which scores 1 when a tool answered before it, else 0."""

    def __init__(self, config: Settings) -> None:
        super().__init__(config)
        self._asked: dict[str, bool] = {}

    async def generate_response(
        self, instance_id: str, messages: Messages, **kwargs: JsonValue
    ) -> tuple[bool, str, float, Row]:
        asked = any(message.get("role") == "tool" for message in messages)
        self._asked[instance_id] = asked
        said = (
            "Thank you for your weather query!"
            if asked
            else "Please use the weather tool to get the weather information."
        )
        return True, said, float(asked), {}

    async def calculate_score(self, instance_id: str, **kwargs: JsonValue) -> float:
        return float(self._asked.get(instance_id, False))

    async def finalize_interaction(self, instance_id: str, **kwargs: JsonValue) -> None:
        self._asked.pop(instance_id, None)
