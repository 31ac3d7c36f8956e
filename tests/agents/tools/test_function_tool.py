"""Function tools: forms of the decorator, schemas, and return values."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest

from hone.agents.tools.contract import (
    CallResult,
    OpenAIFunctionToolSchema,
    ToolError,
    ToolResponse,
    normalize_function_tool_return,
)
from hone.agents.tools.function_tool import (
    FUNCTION_TOOL_REGISTRY,
    function_tool,
    get_function_tool,
    load_function_tools_from_path,
    tool_of,
)
from hone.types import Function


@pytest.fixture(autouse=True)
def no_tools_before() -> Iterator[None]:
    FUNCTION_TOOL_REGISTRY.clear()
    yield
    FUNCTION_TOOL_REGISTRY.clear()


def called(function: Function, **arguments: Any) -> CallResult:
    """Returns the response, the reward and the metrics of a call."""
    tool = tool_of(function, description="d")
    return normalize_function_tool_return(asyncio.run(tool.call(arguments)))


def weather(city: str, unit: Literal["C", "F"] = "C", days: Optional[int] = None) -> str:  # noqa: UP045
    """The weather of a city.

    Sunny, mostly.

    Args:
        city (str): the name of the city,
            in English
        unit: scale of the temperature
        days: how far ahead

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
    def copy(city: Annotated[str, "where"]) -> str:
        """The weather."""
        return weather(city)

    copy.__name__ = "weather"
    assert decorate(copy) is copy
    tool = get_function_tool(name)
    assert (tool.name, tool.fn, tool.tool_schema.function.name) == (name, copy, name)
    assert asyncio.run(tool.call({"city": "Rome"})) == "Rome sunny"


def test_a_description_replaces_that_of_a_schema() -> None:
    for schema in (OWN_SCHEMA, OpenAIFunctionToolSchema.model_validate(OWN_SCHEMA)):

        def forecast(city: str) -> str:
            return city

        tool = tool_of(forecast, "forecast", "Tells the weather.", schema)
        assert tool.tool_schema.function.description == "Tells the weather."
        assert tool.tool_schema.function.parameters is not None


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ToolError, match="takes a name or nothing, got 5"):
        function_tool(5)  # type: ignore[call-overload]


def test_the_schema_has_descriptions_enums_and_what_is_required() -> None:
    assert tool_of(weather).tool_schema.model_dump()["function"] == {
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
                "days": {"type": "integer", "description": "how far ahead"},
            },
            "required": ["city"],
        },
    }


def test_nested_and_annotated_types_are_shown() -> None:
    def many(
        a: Annotated[list[int], "numbers"],
        b: Annotated[dict[str, Any], "names"],
        c: Annotated[float, "how far"],
        d: Annotated[int | str, "which"],
        e: Any,
        f: Any,
    ) -> None:
        """
        :param e: anything
        :param str f: something
        """

    shown = tool_of(many).tool_schema.model_dump()["function"]
    assert shown["parameters"]["properties"] == {
        "a": {"type": "array", "items": {"type": "integer"}, "description": "numbers"},
        "b": {"type": "object", "description": "names"},
        "c": {"type": "number", "description": "how far"},
        "d": {"type": ["integer", "string"], "description": "which"},
        "e": {"type": "string", "description": "anything"},
        "f": {"type": "string", "description": "something"},
    }
    assert shown["description"] == ""


def test_parameters_that_a_model_cannot_name_are_refused() -> None:
    def positional(a: int, /) -> None:
        """Counts."""

    with pytest.raises(ToolError, match="name each one"):
        tool_of(lambda *a: None, description="d")
    with pytest.raises(ToolError, match="positional only"):
        tool_of(positional)


def test_what_the_model_would_not_be_told_is_refused() -> None:
    def silent(x: str) -> None: ...

    def untyped(x):  # type: ignore[no-untyped-def]
        """Doc.

        Args:
            x: a thing
        """

    def partial(x: int, y: int) -> None:
        """Add.

        Args:
            x: the first
        """

    for function, message in (
        (silent, "silent has no docstring"),
        (untyped, "x is missing a type hint"),
        (partial, "no description for the argument y"),
    ):
        with pytest.raises(ToolError, match=message):
            function_tool(function)
        assert function_tool(schema=OWN_SCHEMA)(function) is function
        FUNCTION_TOOL_REGISTRY.clear()


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
        (("alone",), "alone", 0.0, {}),
        (("t", False), "t", 0.0, {}),
    ],
)
def test_what_a_function_may_return(result: Any, text: str, reward: float, metrics: Any) -> None:
    async def later() -> Any:
        return result

    for function in (lambda: result, later):
        answer = called(function)
        assert (answer[0].text, answer[1], answer[2]) == (text, reward, metrics)


def test_an_argument_may_have_any_name() -> None:
    def call(function: Annotated[str, "a"], self: Annotated[str, "b"]) -> str:
        """Both."""
        return function + self

    assert asyncio.run(tool_of(call).call({"function": "a", "self": "b"})) == "ab"


def test_a_response_may_be_text_alone() -> None:
    assert ToolResponse(text="a").is_text_only()
    assert not ToolResponse(text="a", image=["x"]).is_text_only()
    assert not ToolResponse().is_text_only()


@pytest.mark.parametrize("result", [(), ("a", 1, {}, "more")])
def test_a_tuple_of_another_length_is_refused(result: Any) -> None:
    with pytest.raises(TypeError, match="length 1, 2, or 3"):
        normalize_function_tool_return(result)


def test_two_functions_of_one_file_may_not_share_a_name() -> None:
    function_tool("one")(weather)
    function_tool("one")(weather)  # the same function again
    with pytest.raises(ToolError, match="'one' is already registered to weather"):
        function_tool("one", description="another")(lambda: 1)


TOOLS = '''
from hone.tools.function_tool import function_tool

@function_tool("mine")
def first(x: int) -> int:
    """The same.

    Args:
        x: a number
    """
    return x

also = first
'''


def test_a_file_is_run_once_and_gives_its_own_tools_alone(tmp_path: Path) -> None:
    function_tool("before")(weather)
    file = tmp_path / "own.py"
    file.write_text(TOOLS)
    (tool,) = load_function_tools_from_path(str(file))
    assert load_function_tools_from_path(str(file))[0] is tool is FUNCTION_TOOL_REGISTRY["mine"]
    assert tool.name == "mine"
    assert "before" in FUNCTION_TOOL_REGISTRY


def test_two_files_may_have_tools_of_one_name(tmp_path: Path) -> None:
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    for file in files:
        file.write_text(TOOLS)
    first, second = (load_function_tools_from_path(str(file))[0] for file in files)
    assert first is not second
    assert FUNCTION_TOOL_REGISTRY["mine"] is second


def test_a_missing_file_and_a_missing_name_are_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="function_tool_path does not exist"):
        load_function_tools_from_path(str(tmp_path / "no.py"))
    with pytest.raises(KeyError, match="no function tool 'nobody'"):
        get_function_tool("nobody")
