"""Plain functions as tools: `@function_tool` reads the schema off signature and docstring.

    @function_tool
    def add(a: float, b: float = 1.0) -> str:
        '''Add two numbers.

        Args:
            a: the first number
        '''
        return str(a + b)

A function returns text, JSON data or a ToolResponse, alone or as (answer, reward[, metrics]).
Leaves out state: a tool that needs it is a `BaseTool`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, overload

from hone.agents.bounded import in_thread
from hone.agents.tools.answers import function_answer
from hone.agents.tools.contract import BaseTool, OpenAIFunctionToolSchema, ToolError, ToolResponse
from hone.agents.tools.signature import description_of, parameters_of

Function = Callable[..., Any]
Schema = OpenAIFunctionToolSchema | Mapping[str, Any]
_DECLARATION = "__hone_function_tool__"


@dataclass(frozen=True)
class _Declaration:
    """What the decorator was given; None is read off the function."""

    name: str | None = None
    description: str | None = None
    schema: Schema | None = None


@overload
def function_tool(function: Function, /) -> Function: ...


@overload
def function_tool(
    name: str | None = None, /, *, description: str | None = None, schema: Schema | None = None
) -> Callable[[Function], Function]: ...


@overload
def function_tool(
    *, name: str, description: str | None = None, schema: Schema | None = None
) -> Callable[[Function], Function]: ...


def function_tool(
    function: Function | str | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    schema: Schema | None = None,
) -> Any:
    """Decorator: the function is a tool when its file is `multi_turn.function_tool_path`.

    `@function_tool`, `@function_tool()`, `@function_tool("name")` and
    `@function_tool(name=…, description=…, schema=…)` all work.
    """
    if isinstance(function, str):
        function, name = None, function
    declaration = _Declaration(name, description, schema)

    def declare(thing: Function) -> Function:
        setattr(thing, _DECLARATION, declaration)
        return thing

    if function is None:
        return declare
    if not callable(function):
        raise ToolError(f"@function_tool takes a name or nothing, got {function!r}")
    return declare(function)


def is_function_tool(thing: Any) -> bool:
    return callable(thing) and isinstance(getattr(thing, _DECLARATION, None), _Declaration)


def schema_of(function: Function) -> OpenAIFunctionToolSchema:
    """What the decorator was given, and for the rest the function's name, docstring and parameters."""
    given = getattr(function, _DECLARATION, _Declaration())
    if given.schema is not None:
        schema = given.schema
        read = schema.model_dump() if isinstance(schema, OpenAIFunctionToolSchema) else dict(schema)
        described = dict(read.get("function", read))
        described.setdefault("name", given.name or _name_of(function))
        if given.name is not None:
            described["name"] = given.name
    else:
        described = {
            "name": given.name or _name_of(function),
            "description": given.description or description_of(function),
            "parameters": parameters_of(function),
        }
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": described})


def _name_of(function: Function) -> str:
    return getattr(function, "__name__", type(function).__name__)


class FunctionTool(BaseTool):
    """Calls the function; a plain one in a thread, so that other trajectories go on."""

    def __init__(self, function: Function, config: Mapping[str, Any] | None = None):
        self.function = function
        super().__init__(config or {}, schema_of(function))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        call = functools.partial(self.function, **parameters)
        is_async = inspect.iscoroutinefunction(self.function)
        result = await call() if is_async else await in_thread(call)
        return function_answer(await result if inspect.isawaitable(result) else result)
