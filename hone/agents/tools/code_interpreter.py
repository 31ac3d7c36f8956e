"""`code_interpreter`: the model's Python, in the sandbox; it sees what the program printed.

Its config: `timeout_s` (wall seconds of one program) and `memory_mb`. Nothing runs outside the sandbox.
"""

from __future__ import annotations

import asyncio

from hone.agents.tools.contract import BaseTool, OpenAIFunctionToolSchema, ToolResponse
from hone.sandbox import run_python
from hone.types import JsonObject, JsonValue, Row


class CodeInterpreterTool(BaseTool):
    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        code = {
            "type": "string",
            "description": "A whole Python program; print what you want to see",
        }
        return OpenAIFunctionToolSchema.model_validate(
            {
                "type": "function",
                "function": {
                    "name": "code_interpreter",
                    "description": "Run a Python program and read what it printed.",
                    "parameters": {
                        "type": "object",
                        "properties": {"code": code},
                        "required": ["code"],
                    },
                },
            }
        )

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: JsonValue
    ) -> tuple[ToolResponse, float, Row]:
        limits = {
            name: self.config[name] for name in ("timeout_s", "memory_mb") if name in self.config
        }
        code = str(next(iter(parameters.values()), ""))
        result = await asyncio.to_thread(run_python, code, **limits)
        said = "\n".join(part for part in (result.stdout, result.stderr) if part)
        status = str(result.status.value)
        return ToolResponse(text=said or f"({status}, nothing printed)"), 0.0, {"status": status}
