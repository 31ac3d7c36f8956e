"""The tools `python` and `code_interpreter`: run the model's Python in the sandbox.

Config: `stateful` (default true: a call reruns the trajectory's earlier cells, so that variables
persist), `timeout_s` (wall-clock seconds per call) and `memory_mb`.
"""

from __future__ import annotations

from hone.agents.tools.contract import (
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolError,
    ToolResponse,
    function_schema,
)
from hone.event_loop import run_in_thread
from hone.sandbox import run_python
from hone.sandbox.result import SandboxResult, Status
from hone.sandbox.service import SandboxService
from hone.types import Fields, JsonObject, JsonValue, Settings

_PROGRAM = """
import ast, contextlib, io, random, sys, traceback

def run(code):
    tree = ast.parse(code, "<cell>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        if value is not None:
            print(repr(value))

names = {{"__name__": "__main__"}}
random.seed(0)
for cell in {earlier!r}:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(BaseException):
            run(cell)
try:
    run({code!r})
except Exception as error:
    run_frame = error.__traceback__.tb_next  # the frames up to that of `run` are not the cell's
    traceback.print_exception(type(error), error, run_frame and run_frame.tb_next)
    sys.exit(1)
"""
"""The program of a call: reruns earlier cells, then prints this cell's output and value."""


class CodeInterpreterTool(BaseTool):
    """Runs the first argument of a call as Python code, and answers with the printed text."""

    default_name = "code_interpreter"
    default_stateful = True

    def __init__(
        self, config: Settings, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self._is_stateful = bool(config.get("stateful", self.default_stateful))
        super().__init__(config, tool_schema)
        self._cells: dict[str, dict[object, str]] = {}
        """Cells by trajectory, in call order; each has a unique key, because calls may run concurrently."""

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        persistence = " Variables stay between calls." if self._is_stateful else ""
        return function_schema(
            self.default_name,
            f"Run Python code and read what it printed.{persistence}",
            code={"type": "string", "description": "Python code; print what you want to see"},
        )

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: JsonValue
    ) -> tuple[ToolResponse, float, Fields]:
        code = str(next(iter(parameters.values()), ""))
        if self._is_stateful:
            result = await self._run_cell(instance_id, code)
        else:
            result = await run_in_thread(self.run, code=code)
        text = "\n".join(part for part in (result.stdout, result.stderr) if part)
        status = str(result.status.value)
        return ToolResponse(text=text or f"({status}, nothing printed)"), 0.0, {"status": status}

    async def _run_cell(self, instance_id: str, code: str) -> SandboxResult:
        """Runs a cell after the earlier cells, and stores the cell if its status is OK or ERROR."""
        cells = self._cells.setdefault(instance_id, {})
        program = _PROGRAM.format(earlier=list(cells.values()), code=code)
        key, should_rerun = object(), False
        cells[key] = code
        try:
            result = await run_in_thread(self.run, code=program)
            should_rerun = result.status in (Status.OK, Status.ERROR)
        finally:
            if not should_rerun:
                del cells[key]
        return result

    async def release(self, instance_id: str, **kwargs: JsonValue) -> None:
        self._cells.pop(instance_id, None)

    def run(self, code: str) -> SandboxResult:
        """Runs one program and returns its result."""
        limits = {
            name: self.config[name] for name in ("timeout_s", "memory_mb") if name in self.config
        }
        return run_python(code, **limits)


class PythonTool(CodeInterpreterTool):
    """The same tool under the name `python`."""

    default_name = "python"


class SandboxFusionTool(CodeInterpreterTool):
    """Runs programs in a remote service, with the config of verl's tool of this name."""

    default_stateful = False

    def __init__(
        self, config: Settings, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        url, language = config.get("sandbox_fusion_url"), config.get("default_language", "python")
        if not url or language != "python":
            raise ToolError(
                "SandboxFusionTool runs python in the service at sandbox_fusion_url, got "
                f"{language!r} and {url!r}; `python -m hone.sandbox.server` starts a service"
            )
        self._memory_mb = config.get("memory_limit_mb", 1024)
        self._service = SandboxService(
            url, max_concurrent=config.get("rate_limit", 10), memory_limit_mb=self._memory_mb
        )

    def run(self, code: str) -> SandboxResult:
        timeout_s = self.config.get("default_timeout", 30)
        return self._service.run_python(code, timeout_s=timeout_s, memory_mb=self._memory_mb)
