"""The tool `calculator`: evaluates arithmetic without running code."""

from __future__ import annotations

from hone.agents.tools.contract import (
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolResponse,
    function_schema,
)
from hone.rewards.expressions import ExpressionError, evaluate_like_python
from hone.types import Fields, JsonObject, JsonValue


class CalculatorTool(BaseTool):
    """Evaluates the first argument of a call; supports + - * / // ** and parentheses."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return function_schema(
            "calculator",
            "The value of an arithmetic expression.",
            expression={"type": "string", "description": "Arithmetic, as in 23 * 45 + 67"},
        )

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: JsonValue
    ) -> tuple[ToolResponse, float, Fields]:
        text = str(next(iter(parameters.values()), ""))
        try:
            value = evaluate_like_python(text)
        except ExpressionError as error:
            return ToolResponse(text=f"this is not arithmetic: {error}"), 0.0, {"status": "refused"}
        answer = str(value) if isinstance(value, int) else f"{value:.12g}"
        return ToolResponse(text=answer), 0.0, {"status": "ok"}
