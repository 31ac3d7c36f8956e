"""The tool of rows with `tools_kwargs.calc_gsm8k_reward.create_kwargs: {ground_truth}`."""

from __future__ import annotations

from typing import Any

from hone.agents.tools.contract import (
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolResponse,
    function_schema,
)
from hone.rewards.scores.gsm8k import compute_score
from hone.types import Fields, JsonObject, JsonValue, Settings

NO_IMPROVEMENT_REWARD = -0.05  # reward of a call whose score does not exceed the best earlier score


class Gsm8kTool(BaseTool):
    """Scores an answer; a call that does not improve the best score gets a small penalty."""

    def __init__(self, config: Settings, tool_schema: OpenAIFunctionToolSchema | None = None):
        super().__init__(config, tool_schema)
        self._states: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return function_schema(
            "calc_gsm8k_reward",
            "Check an answer to a grade-school problem: 1.0 is right.",
            answer={"type": "string", "description": "The model's answer, as in the last line"},
        )

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: JsonValue
    ) -> tuple[str, ToolResponse]:
        instance_id, response = await super().create(instance_id)
        self._states[instance_id] = {"ground_truth": ground_truth, "answer": "", "best": 0.0}
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: JsonValue
    ) -> tuple[ToolResponse, float, Fields]:
        answer = parameters.get("answer", "")
        state = self._states[instance_id]
        state["answer"] = str(answer)
        score = await self.calc_reward(instance_id)
        reward = 0.0 if score > state["best"] else NO_IMPROVEMENT_REWARD
        state["best"] = max(score, state["best"])
        message = f"Current parsed answer={answer!r} score={score}"
        return ToolResponse(text=message), reward, {"score": score}

    async def calc_reward(self, instance_id: str, **kwargs: JsonValue) -> float:
        state = self._states[instance_id]
        return compute_score(state["answer"], state["ground_truth"], method="flexible")

    async def release(self, instance_id: str, **kwargs: JsonValue) -> None:
        del self._states[instance_id]
