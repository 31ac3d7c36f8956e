"""Function tools: every form of the decorator, what the schema says, what a function may return."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, Optional

import pytest

from hone.agents.tools.contract import OpenAIFunctionToolSchema, ToolError, ToolResponse
from hone.agents.tools.function_tool import FunctionTool, function_tool, is_function_tool


def weather(city: str, unit: Literal["C", "F"] = "C", days: Optional[int] = None) -> str:  # noqa: UP045
    """The weather of a city.

    Sunny, mostly.

    Args:
        city (str): the name of the city,
            in English
        unit: scale of the temperature

    Returns:
        text: what it will be
    """
    return f"{city} sunny"


OWN_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.mark.parametrize(
    ("decorate", "name"),
    [
        (function_tool, "weather"),
        (function_tool(), "weather"),
        (function_tool("sky"), "sky"),
        (function_tool(name="sky"), "sky"),
        (function_tool(schema=OWN_SCHEMA), "forecast"),
        (function_tool(schema=OWN_SCHEMA["function"]), "forecast"),
        (function_tool(schema=OpenAIFunctionToolSchema.model_validate(OWN_SCHEMA)), "forecast"),
        (function_tool(name="sky", schema=OWN_SCHEMA), "sky"),
    ],
)
def test_every_form_of_the_decorator_makes_a_tool(decorate: Any, name: str) -> None:
    def copy(city: str) -> str:
        return weather(city)

    copy.__name__ = "weather"
    tool = decorate(copy)
    assert tool is copy
    assert is_function_tool(tool)
    assert FunctionTool(tool).name == name
    assert asyncio.run(FunctionTool(tool).execute("i", {"city": "Rome"}))[0].text == "Rome sunny"


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ToolError, match="takes a name or nothing, got 5"):
        function_tool(5)  # type: ignore[call-overload]


def test_the_schema_has_descriptions_enums_and_what_is_required() -> None:
    assert FunctionTool(weather).tool_schema.model_dump()["function"] == {
        "name": "weather",
        "description": "The weather of a city.\n\nSunny, mostly.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "the name of the city, in English"},
                "unit": {
                    "type": "string",
                    "description": "scale of the temperature",
                    "enum": ["C", "F"],
                },
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    }


def test_nested_and_annotated_types_are_shown() -> None:
    def many(
        a: list[int],
        b: dict[str, Any],
        c: Annotated[float, "how far"],
        d: int | str,
        e: Any,
        f: Any,
    ) -> None:
        """
        :param e: anything
        :param str f: something
        """

    shown = FunctionTool(many).tool_schema.model_dump()["function"]
    assert shown["parameters"]["properties"] == {
        "a": {"type": "array", "items": {"type": "integer"}},
        "b": {"type": "object"},
        "c": {"type": "number", "description": "how far"},
        "d": {"type": ["integer", "string"]},
        "e": {"type": "string", "description": "anything"},
        "f": {"type": "string", "description": "something"},
    }
    assert shown["description"] == ""


def test_parameters_that_a_model_cannot_name_are_refused() -> None:
    def positional(a: int, /) -> None: ...

    with pytest.raises(ToolError, match="name every parameter"):
        FunctionTool(lambda *a: None)
    with pytest.raises(ToolError, match="positional only"):
        FunctionTool(positional)


@pytest.mark.parametrize(
    ("result", "text", "reward", "metrics"),
    [
        ("Rome sunny", "Rome sunny", 0.0, {}),
        (("Rome sunny", 0.5), "Rome sunny", 0.5, {}),
        (("Rome sunny", 1, {"t": 3}), "Rome sunny", 1.0, {"t": 3}),
        (("Rome sunny", None, None), "Rome sunny", 0.0, {}),
        (ToolResponse(text="hi"), "hi", 0.0, {}),
        ((ToolResponse(text="hi"), 0.25), "hi", 0.25, {}),
        ({"a": [1, None, "é"]}, '{"a": [1, null, "é"]}', 0.0, {}),
        (({"a": 1}, 0.5), '{"a": 1}', 0.5, {}),
        ([1, "b"], '[1, "b"]', 0.0, {}),
        (("a", "b"), '["a", "b"]', 0.0, {}),
        ((3, 4), "[3, 4]", 0.0, {}),
        (7, "7", 0.0, {}),
        (None, "", 0.0, {}),
    ],
)
def test_what_a_function_may_return(result: Any, text: str, reward: float, metrics: Any) -> None:
    async def later() -> Any:
        return result

    for function in (lambda: result, later):
        answer = asyncio.run(FunctionTool(function).execute("i", {}))
        assert (answer[0].text, answer[1], answer[2]) == (text, reward, metrics)


def test_an_argument_may_have_any_name() -> None:
    def call(function: str, self: str) -> str:
        return function + self

    assert asyncio.run(FunctionTool(call).execute("i", {"function": "a", "self": "b"}))[0].text == (
        "ab"
    )


def test_a_response_may_be_text_alone() -> None:
    assert ToolResponse(text="a").is_text_only()
    assert not ToolResponse(text="a", image=["x"]).is_text_only()
    assert not ToolResponse().is_text_only()
