"""Plain functions as tools: `@function_tool` reads the schema off signature and docstring.

    @function_tool
    def add(a: float, b: float) -> str:
        "Add two numbers."
        return str(a + b)

Leaves out state and rewards: a tool that needs them is a `BaseTool`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hone.agents.bounded import in_thread
from hone.agents.tools.contract import BaseTool, OpenAIFunctionToolSchema, ToolError, ToolResponse

_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    dict: "object",
}
_MARK = "__hone_function_tool__"


def function_tool(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: the function is a tool when its file is `multi_turn.function_tool_path`."""
    setattr(function, _MARK, True)
    return function


def is_function_tool(thing: Any) -> bool:
    return callable(thing) and getattr(thing, _MARK, False) is True


def schema_of(function: Callable[..., Any]) -> OpenAIFunctionToolSchema:
    """The function's name, docstring, parameters and their types."""
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolError(
                f"tool {function.__name__}: *{name} cannot be shown to a model; name every parameter"
            )
        properties[name] = {"type": _json_type(hints.get(name, str))}
        if parameter.default is parameter.empty:
            required.append(name)
    described = {
        "name": function.__name__,
        "description": inspect.getdoc(function) or "",
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": described})


def _json_type(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        inner = [part for part in get_args(hint) if part is not NoneType]
        hint = inner[0] if len(inner) == 1 else str
    return _JSON_TYPES.get(get_origin(hint) or hint, "string")


class FunctionTool(BaseTool):
    """Calls the function; a plain one in a thread, so that other trajectories go on."""

    def __init__(self, function: Callable[..., Any], config: Mapping[str, Any] | None = None):
        self.function = function
        super().__init__(config or {}, schema_of(function))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        if inspect.iscoroutinefunction(self.function):
            result = await self.function(**parameters)
        else:
            result = await in_thread(self.function, **parameters)
        return ToolResponse(text=str(result)), 0.0, {}
