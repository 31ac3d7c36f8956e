"""The interaction of rows with `interaction_kwargs: {name: weather, query}`."""

from __future__ import annotations

from hone.agents.interactions.contract import BaseInteraction, Messages
from hone.types import Fields, JsonValue, Settings


class WeatherInteraction(BaseInteraction):
    """Ends the conversation after the first turn; the score is 1 if a tool was called, else 0."""

    def __init__(self, config: Settings) -> None:
        super().__init__(config)
        self._used_tool: dict[str, bool] = {}

    async def generate_response(
        self, instance_id: str, messages: Messages, **kwargs: JsonValue
    ) -> tuple[bool, str, float, Fields]:
        used_tool = any(message.get("role") == "tool" for message in messages)
        self._used_tool[instance_id] = used_tool
        reply = (
            "Thank you for your weather query!"
            if used_tool
            else "Please use the weather tool to get the weather information."
        )
        return True, reply, float(used_tool), {}

    async def calculate_score(self, instance_id: str, **kwargs: JsonValue) -> float:
        return float(self._used_tool.get(instance_id, False))

    async def finalize_interaction(self, instance_id: str, **kwargs: JsonValue) -> None:
        self._used_tool.pop(instance_id, None)
