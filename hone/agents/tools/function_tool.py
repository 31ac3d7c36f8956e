"""Plain functions as tools: `@function_tool` derives the schema from signature and docstring.

    @function_tool
    def add(a: float, b: float = 1.0) -> str:
        '''Add two numbers.

        Args:
            a: the first number
        '''
        return str(a + b)

A function returns text, JSON data or a ToolResponse, alone or as (answer, reward[, metrics]).
A function tool has no state; a tool that needs state is a `BaseTool`.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, overload

from hone.agents.tools.contract import OpenAIFunctionToolSchema, ToolError, ToolResult
from hone.agents.tools.signature import description_of, parameters_schema
from hone.event_loop import run_in_thread
from hone.plugins import MissingFile, load_module
from hone.text import start_folder
from hone.types import Fields, Function, JsonObject, Settings

F = TypeVar("F", bound=Function)
Schema = OpenAIFunctionToolSchema | Settings
_TOOL_ATTRIBUTE = "__hone_function_tool__"

logger = logging.getLogger(__name__)


@dataclass
class FunctionTool:
    """A tool without state: a function and its schema."""

    name: str
    fn: Function
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: JsonObject) -> ToolResult:
        """Calls the function; a synchronous one runs in a thread."""
        call = functools.partial(self.fn, **parameters)
        result = await call() if self.is_async else await run_in_thread(call)
        return await result if inspect.isawaitable(result) else result


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
"""Tools by name; a tool replaces one of the same name from an earlier file."""
_LOADED_FUNCTION_TOOL_PATHS: dict[str, list[FunctionTool]] = {}


@overload
def function_tool(name: F, /) -> F: ...


@overload
def function_tool(
    name: str | None = None, *, description: str | None = None, schema: Schema | None = None
) -> Callable[[F], F]: ...


def function_tool(
    name: F | str | None = None,
    *,
    description: str | None = None,
    schema: Schema | None = None,
) -> F | Callable[[F], F]:
    """Makes a tool of a function in the file `multi_turn.function_tool_path`.

    `@function_tool`, `@function_tool()`, `@function_tool("name")` and
    `@function_tool(name=…, description=…, schema=…)` all work.
    """
    if callable(name):
        return _register(name, None, description, schema)
    if name is not None and not isinstance(name, str):
        raise ToolError(f"@function_tool takes a name or nothing, got {name!r}")
    return lambda function: _register(function, name, description, schema)


def _register(function: F, name: str | None, description: str | None, schema: Schema | None) -> F:
    tool = tool_of(function, name, description, schema)
    registered_tool = FUNCTION_TOOL_REGISTRY.get(tool.name)
    if (
        registered_tool is not None
        and registered_tool.fn is not function
        and _module_of(registered_tool.fn) == _module_of(function)
    ):
        raise ToolError(
            f"the function tool {tool.name!r} is already registered to "
            f"{_name_of(registered_tool.fn)}; give {_name_of(function)} another name"
        )
    FUNCTION_TOOL_REGISTRY[tool.name] = tool
    setattr(function, _TOOL_ATTRIBUTE, tool)
    return function


def tool_of(
    function: Function,
    name: str | None = None,
    description: str | None = None,
    schema: Schema | None = None,
) -> FunctionTool:
    """Makes a tool from a function; name, description and schema default to the function's own."""
    tool_schema = _schema_of(function, name, description, schema)
    if description is None and isinstance(schema, OpenAIFunctionToolSchema):
        tool_schema = schema if name in (None, schema.function.name) else tool_schema
    is_async = inspect.iscoroutinefunction(function)
    return FunctionTool(tool_schema.function.name, function, tool_schema, is_async)


def _schema_of(
    function: Function, name: str | None, description: str | None, schema: Schema | None
) -> OpenAIFunctionToolSchema:
    if schema is None:
        if not description and not inspect.getdoc(function):
            raise ToolError(
                f"tool {name or _name_of(function)} has no docstring; describe the function there, "
                "and its arguments under `Args:`"
            )
        definition: Fields = {
            "name": name or _name_of(function),
            "description": description or description_of(function),
            "parameters": parameters_schema(function),
        }
    else:
        whole = schema.model_dump() if isinstance(schema, OpenAIFunctionToolSchema) else schema
        function_part = whole.get("function")  # a schema may also be the function's part alone
        definition = dict(function_part if isinstance(function_part, Mapping) else whole)
        definition["name"] = name or definition.get("name") or _name_of(function)
        if description is not None:
            definition["description"] = description
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": definition})


def _name_of(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _module_of(function: Function) -> str | None:
    return getattr(function, "__module__", None)


def get_function_tool(name: str) -> FunctionTool:
    """Returns the tool with this name; raises KeyError if no loaded file defines it."""
    if name not in FUNCTION_TOOL_REGISTRY:
        raise KeyError(
            f"there is no function tool {name!r}; name its file in multi_turn.function_tool_path"
        )
    return FUNCTION_TOOL_REGISTRY[name]


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """Returns the tools of a Python file; the file is executed once per process."""
    file = Path(path).expanduser()
    if file.suffix == ".py" and not file.is_file():
        raise MissingFile(f"function_tool_path does not exist: {str(file)!r}{start_folder(file)}")
    key = str(file.resolve()) if file.is_file() else path
    if key not in _LOADED_FUNCTION_TOOL_PATHS:
        values = vars(load_module(path)).values()
        tools = [tool for tool in (_attached_tool(value) for value in values) if tool is not None]
        unique_tools = list({id(tool): tool for tool in tools}.values())
        FUNCTION_TOOL_REGISTRY.update({tool.name: tool for tool in unique_tools})
        if not unique_tools:
            logger.warning("%s: no @function_tool decorators found above its functions", path)
        _LOADED_FUNCTION_TOOL_PATHS[key] = unique_tools
    return _LOADED_FUNCTION_TOOL_PATHS[key]


def _attached_tool(value: Function) -> FunctionTool | None:
    """Returns the tool that `@function_tool` attached to a function, or None."""
    tool = getattr(value, _TOOL_ATTRIBUTE, None) if callable(value) else None
    return tool if isinstance(tool, FunctionTool) else None
