"""Plain functions as tools: `@function_tool` derives the schema from the signature and the docstring.

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

from hone.agents.bounded import in_thread
from hone.agents.tools.answers import ToolResult
from hone.agents.tools.contract import OpenAIFunctionToolSchema, ToolError
from hone.agents.tools.signature import description_of, parameters_of
from hone.plugins import MissingFile, load_module
from hone.types import Function, JsonObject, Row, Settings

F = TypeVar("F", bound=Function)
Schema = OpenAIFunctionToolSchema | Settings
_TOOL = "__hone_function_tool__"

logger = logging.getLogger(__name__)


@dataclass
class FunctionTool:
    """A function and its schema. It has no state, so nothing is created or released."""

    name: str
    fn: Function
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: JsonObject) -> ToolResult:
        """Calls the function; a synchronous one runs in a thread, so that other trajectories continue."""
        call = functools.partial(self.fn, **parameters)
        result = await call() if self.is_async else await in_thread(call)
        return await result if inspect.isawaitable(result) else result


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
"""The tools by name; a later file's tool replaces one of the same name. A run uses its file's tools."""
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
    """Decorator that makes a function a tool when its file is `multi_turn.function_tool_path`.

    `@function_tool`, `@function_tool()`, `@function_tool("name")` and
    `@function_tool(name=…, description=…, schema=…)` all work.
    """
    if callable(name):
        return _registered(name, None, description, schema)
    if name is not None and not isinstance(name, str):
        raise ToolError(f"@function_tool takes a name or nothing, got {name!r}")
    return lambda function: _registered(function, name, description, schema)


def _registered(function: F, name: str | None, text: str | None, schema: Schema | None) -> F:
    tool = tool_of(function, name, text, schema)
    taken = FUNCTION_TOOL_REGISTRY.get(tool.name)
    if taken is not None and taken.fn is not function and _file_of(taken.fn) == _file_of(function):
        raise ToolError(
            f"the function tool {tool.name!r} is already registered to "
            f"{_name_of(taken.fn)}; give {_name_of(function)} another name"
        )
    FUNCTION_TOOL_REGISTRY[tool.name] = tool
    setattr(function, _TOOL, tool)
    return function


def tool_of(
    function: Function,
    name: str | None = None,
    description: str | None = None,
    schema: Schema | None = None,
) -> FunctionTool:
    """Makes a tool from a function, and derives the name, description and schema that are not given."""
    if isinstance(schema, OpenAIFunctionToolSchema) and name in (None, schema.function.name):
        read = schema
    else:
        read = _schema_of(function, name, description, schema)
    is_async = inspect.iscoroutinefunction(function)
    return FunctionTool(read.function.name, function, read, is_async)


def _schema_of(
    function: Function, name: str | None, description: str | None, schema: Schema | None
) -> OpenAIFunctionToolSchema:
    if schema is None:
        if not description and not inspect.getdoc(function):
            raise ToolError(
                f"tool {name or _name_of(function)} has no docstring; say there what it does, and "
                "under `Args:` what its arguments mean"
            )
        described: Row = {
            "name": name or _name_of(function),
            "description": description or description_of(function),
            "parameters": parameters_of(function),
        }
    else:
        given = (
            schema.model_dump() if isinstance(schema, OpenAIFunctionToolSchema) else dict(schema)
        )
        inner = given.get("function")
        described = dict(inner) if isinstance(inner, Mapping) else given
        described["name"] = name or described.get("name") or _name_of(function)
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": described})


def _name_of(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _file_of(function: Function) -> str | None:
    return getattr(function, "__module__", None)


def get_function_tool(name: str) -> FunctionTool:
    """Returns the tool with this name; raises KeyError if no loaded file defines it."""
    if name not in FUNCTION_TOOL_REGISTRY:
        raise KeyError(
            f"there is no function tool {name!r}; name its file in multi_turn.function_tool_path"
        )
    return FUNCTION_TOOL_REGISTRY[name]


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """Returns the tools of a Python file, which is executed once per process."""
    file = Path(path).expanduser()
    if file.suffix == ".py" and not file.is_file():
        raise MissingFile(f"function_tool_path does not exist: {path!r} (looked in {Path.cwd()})")
    key = str(file.resolve()) if file.is_file() else path
    if key not in _LOADED_FUNCTION_TOOL_PATHS:
        things = vars(load_module(path)).values()
        tools = [tool for tool in (_tool_on(thing) for thing in things) if tool is not None]
        unique = list({id(tool): tool for tool in tools}.values())
        FUNCTION_TOOL_REGISTRY.update({tool.name: tool for tool in unique})
        if not unique:
            logger.warning("%s: no @function_tool decorators found above its functions", path)
        _LOADED_FUNCTION_TOOL_PATHS[key] = unique
    return _LOADED_FUNCTION_TOOL_PATHS[key]


def _tool_on(thing: Function) -> FunctionTool | None:
    tool = getattr(thing, _TOOL, None) if callable(thing) else None
    return tool if isinstance(tool, FunctionTool) else None
