"""The interaction of rows with `interaction_kwargs: {name: gsm8k, query, ground_truth}`."""

from __future__ import annotations

from typing import Any

from hone.agents.interactions.contract import BaseInteraction, Messages
from hone.data.messages import content_text
from hone.rewards.scores import gsm8k
from hone.types import Fields, JsonValue, Settings

CORRECT_REPLY = "Your response is correct!"
INCORRECT_REPLY = "Your response is incorrect! You need to reflect on your answer and try again."


class Gsm8kInteraction(BaseInteraction):
    """Ends the conversation at the first correct answer; a turn scores 1 if correct, else 0."""

    def __init__(self, config: Settings) -> None:
        super().__init__(config)
        self._instance_dict: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: JsonValue
    ) -> str:
        instance_id = await super().start_interaction(instance_id)
        self._instance_dict[instance_id] = {"response": "", "ground_truth": ground_truth}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: Messages, **kwargs: JsonValue
    ) -> tuple[bool, str, float, Fields]:
        turns = [message for message in messages if message.get("role") == "assistant"]
        self._instance_dict[instance_id]["response"] = turns[-1].get("content") if turns else ""
        score = await self.calculate_score(instance_id)
        return score == 1.0, CORRECT_REPLY if score == 1.0 else INCORRECT_REPLY, score, {}

    async def calculate_score(self, instance_id: str, **kwargs: JsonValue) -> float:
        state = self._instance_dict[instance_id]
        response = content_text(state["response"])
        return gsm8k.compute_score(response, state["ground_truth"], "strict", 0.0, 1.0)

    async def finalize_interaction(self, instance_id: str, **kwargs: JsonValue) -> None:
        del self._instance_dict[instance_id]
