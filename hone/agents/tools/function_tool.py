"""Plain functions as tools: `@function_tool` derives the schema from signature and docstring.

A function returns text, JSON data or a ToolResponse, alone or as (answer, reward[, metrics]).
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
from hone.text import working_folder_hint
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
        """Calls the function; a synchronous function runs in a thread."""
        call = functools.partial(self.fn, **parameters)
        result = await call() if self.is_async else await run_in_thread(call)
        return await result if inspect.isawaitable(result) else result


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
"""Tools by name; a tool replaces a tool of the same name from an earlier file."""
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
    """Decorates a function of the file `multi_turn.function_tool_path`, which makes it a tool."""
    if callable(name):
        return _register(name, None, description, schema)
    if name is not None and not isinstance(name, str):
        raise ToolError(f"@function_tool takes a name or nothing, got {name!r}")
    return lambda function: _register(function, name, description, schema)


def _register(function: F, name: str | None, description: str | None, schema: Schema | None) -> F:
    tool = tool_of(function, name, description, schema)
    registered = FUNCTION_TOOL_REGISTRY.get(tool.name, tool).fn
    modules = {getattr(fn, "__module__", None) for fn in (registered, function)}
    if registered is not function and len(modules) == 1:
        raise ToolError(
            f"the function tool {tool.name!r} is already registered to {_name_of(registered)}; give "
            f"{_name_of(function)} another name"
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
        data = schema.model_dump() if isinstance(schema, OpenAIFunctionToolSchema) else schema
        function_data = data.get("function")
        # A schema may also be the value of `function` alone.
        definition = dict(function_data if isinstance(function_data, Mapping) else data)
        definition["name"] = name or definition.get("name") or _name_of(function)
        if description is not None:
            definition["description"] = description
    tool_schema = OpenAIFunctionToolSchema.model_validate({"function": definition})
    is_async = inspect.iscoroutinefunction(function)
    return FunctionTool(tool_schema.function.name, function, tool_schema, is_async)


def _name_of(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


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
        raise MissingFile(
            f"function_tool_path does not exist: {str(file)!r}{working_folder_hint(file)}"
        )
    key = str(file.resolve()) if file.is_file() else path
    if key not in _LOADED_FUNCTION_TOOL_PATHS:
        values = [value for value in vars(load_module(path)).values() if callable(value)]
        tools = [getattr(value, _TOOL_ATTRIBUTE, None) for value in values]
        unique_tools = list(
            {id(tool): tool for tool in tools if isinstance(tool, FunctionTool)}.values()
        )
        FUNCTION_TOOL_REGISTRY.update({tool.name: tool for tool in unique_tools})
        if not unique_tools:
            logger.warning("%s: no @function_tool decorators found above its functions", path)
        _LOADED_FUNCTION_TOOL_PATHS[key] = unique_tools
    return _LOADED_FUNCTION_TOOL_PATHS[key]
