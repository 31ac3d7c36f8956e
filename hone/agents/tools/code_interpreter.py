"""`code_interpreter`: the model's Python, in the sandbox; it sees what the program printed.

Its config: `timeout_s` (wall seconds of one program) and `memory_mb`. Nothing runs outside the sandbox.
`SandboxFusionTool` has verl's config, and runs programs in the service of `sandbox_fusion_url`.
"""

from __future__ import annotations

import asyncio

from hone.agents.tools.contract import (
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolError,
    ToolResponse,
)
from hone.sandbox import run_python
from hone.sandbox.result import Job, SandboxResult
from hone.sandbox.service import SandboxService
from hone.types import JsonObject, JsonValue, Row, Settings


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
        result = await asyncio.to_thread(self.run, str(next(iter(parameters.values()), "")))
        said = "\n".join(part for part in (result.stdout, result.stderr) if part)
        status = str(result.status.value)
        return ToolResponse(text=said or f"({status}, nothing printed)"), 0.0, {"status": status}

    def run(self, code: str) -> SandboxResult:
        """What became of one program."""
        limits = {
            name: self.config[name] for name in ("timeout_s", "memory_mb") if name in self.config
        }
        return run_python(code, **limits)


class SandboxFusionTool(CodeInterpreterTool):
    """verl's tool of that name: `sandbox_fusion_url`, `rate_limit`, `default_timeout`, `memory_limit_mb`."""

    def __init__(
        self, config: Settings, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        url, language = config.get("sandbox_fusion_url"), config.get("default_language", "python")
        if not url or language != "python":
            raise ToolError(
                f"SandboxFusionTool runs python in the service at sandbox_fusion_url, got {language!r} "
                f"and {url!r}; `hone sandbox serve` starts a service"
            )
        self._memory_mb = config.get("memory_limit_mb", 1024)
        self._service = SandboxService(
            url, max_concurrent=config.get("rate_limit", 10), memory_limit_mb=self._memory_mb
        )

    def run(self, code: str) -> SandboxResult:
        timeout = self.config.get("default_timeout", 30)
        return self._service.run(Job(code, timeout_s=timeout, memory_mb=self._memory_mb))
