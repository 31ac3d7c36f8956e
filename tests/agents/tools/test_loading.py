"""Tools from a YAML list and from decorated functions, and errors in such lists."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hone.agents.tools.contract import (
    BaseTool,
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionToolCall,
    OpenAIFunctionToolSchema,
    ToolError,
)
from hone.agents.tools.function_tool import FunctionTool
from hone.agents.tools.gsm8k import Gsm8kTool
from hone.agents.tools.loading import initialize_interactions_from_config, load_all_tools
from hone.plugins import PluginError

LISTED = """
tools:
  - class_name: hone.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: Check an answer.
        parameters:
          type: object
          properties:
            answer: {type: string, description: the answer, maxLength: 20}
            kind: {type: string, enum: [a, b]}
          required: [answer]
"""
FUNCTIONS = '''
from hone.agents.tools.function_tool import function_tool


@function_tool
def add(a: float, b: int = 1, name: str | None = None) -> float:
    """Add two numbers.

    Args:
        a: the first
        b: the second
        name: of the sum
    """
    return a + b


@function_tool
async def shout(text: str) -> str:
    """Say it louder.

    Args:
        text: what to say
    """
    return text.upper()


def not_a_tool() -> None: ...
'''


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_listed_class_keeps_its_schema_to_the_last_key(tmp_path: Path) -> None:
    (tool,) = load_all_tools(write(tmp_path / "tools.yaml", LISTED), None)
    assert tool.name == "calc_gsm8k_reward"
    assert isinstance(tool, Gsm8kTool)
    shown = tool.tool_schema.model_dump()
    assert shown["function"]["parameters"]["properties"] == {
        "answer": {"type": "string", "description": "the answer", "maxLength": 20},
        "kind": {"type": "string", "enum": ["a", "b"]},
    }
    assert OpenAIFunctionToolSchema.model_validate(shown) == tool.tool_schema


def test_decorated_functions_are_tools_with_a_schema_from_their_signature(tmp_path: Path) -> None:
    loaded = load_all_tools(None, write(tmp_path / "own.py", FUNCTIONS))
    tools = {tool.name: tool for tool in loaded if isinstance(tool, FunctionTool)}
    assert list(tools) == ["add", "shout"]
    assert tools["add"].tool_schema.model_dump()["function"] == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "the first"},
                "b": {"type": "integer", "description": "the second"},
                "name": {"type": "string", "description": "of the sum"},
            },
            "required": ["a"],
        },
    }
    assert asyncio.run(tools["add"].call({"a": 2})) == 3
    assert asyncio.run(tools["shout"].call({"text": "ho"})) == "HO"


def test_both_sources_together_may_not_share_a_name(tmp_path: Path) -> None:
    listed = write(tmp_path / "tools.yaml", LISTED)
    own = FUNCTIONS.replace("def add", "def calc_gsm8k_reward")
    with pytest.raises(ToolError, match=r"\['calc_gsm8k_reward'\] collide with tools of"):
        load_all_tools(listed, write(tmp_path / "own.py", own))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tools: []", "no list `tools:`"),
        ("tools:\n - config: {}", "needs a `class_name`"),
        ("tools:\n - name: weather", "the built-in tools are calculator, .*; write the class"),
        (
            "tools:\n - {name: python, parametres: {}}",
            "unknown key 'parametres'; use config, desc",
        ),
        ("tools:\n - {name: python, parameters: [code]}", "`parameters` must map names to a type"),
        ("tools:\n - class_name: a.B\n   config: {type: image}", "type 'image' is not supported"),
        (
            "tools:\n - class_name: hone.agents.tools.contract.BaseTool",
            "BaseTool has no schema of its own",
        ),
        (
            "tools:\n - class_name: hone.agents.tools.gsm8k.Gsm8kTool\n   tool_schema: {name: x}",
            "a tool schema is",
        ),
        (
            "tools:\n - class_name: hone.agents.tools.gsm8k.Gsm8kTool\n   tool_schema: x",
            "a tool schema is",
        ),
        ("tools:\n - name: [x]", "has no `class_name`"),
        (
            "tools:\n - {name: calculator, parameters: {expression: text}}",
            "is an object with a type",
        ),
        ("tools:\n - class_name: os.system", "os.system: TypeError"),
    ],
)
def test_a_wrong_list_says_what_is_wrong(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ToolError, match=why):
        load_all_tools(write(tmp_path / "tools.yaml", text), None)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("{name: x, description: [a]}", "description of x is text"),
        ("{name: x, parameters: [1]}", "`parameters` is an object, got"),
        ("{name: x, parameters: {type: array}}", "has type object, got 'array'"),
        ("{name: x, parameters: {properties: [a]}}", "`properties` is an object"),
        (
            "{name: x, parameters: {properties: {a: 5}}}",
            "a parameter of a tool schema is an object",
        ),
        ("{name: x, parameters: {properties: {5: {type: string}}}}", "name of a parameter is text"),
        ("{name: x, parameters: {required: a}}", "`required` is a list of names, got 'a'"),
    ],
)
def test_a_wrong_schema_says_what_is_wrong(tmp_path: Path, function: str, why: str) -> None:
    text = "tools:\n - class_name: hone.agents.tools.gsm8k.Gsm8kTool\n   tool_schema: {function: "
    with pytest.raises(ToolError, match=why):
        load_all_tools(write(tmp_path / "tools.yaml", text + function + "}"), None)


def test_a_missing_file_and_a_file_without_tools_are_said(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"no\.yaml does not exist"):
        load_all_tools(str(tmp_path / "no.yaml"), None)
    with pytest.raises(ToolError, match="has no tool; put @function_tool"):
        load_all_tools(None, write(tmp_path / "empty.py", "x = 1\n"))
    own = FUNCTIONS.replace("def add(a: float", "def add(*a: float")
    with pytest.raises(PluginError, match=r"variadic parameter .*is not supported; name each"):
        load_all_tools(None, write(tmp_path / "star.py", own))


def test_interactions_are_listed_by_name(tmp_path: Path) -> None:
    entry = "  - class_name: hone.interactions.gsm8k_interaction.Gsm8kInteraction\n"
    interactions = initialize_interactions_from_config(
        write(tmp_path / "i.yaml", "interaction:\n" + entry)
    )
    assert interactions["gsm8k"].name == "gsm8k"
    twice = write(tmp_path / "two.yaml", "interaction:\n" + entry + entry)
    with pytest.raises(ToolError, match="Duplicate interaction name 'gsm8k' found"):
        initialize_interactions_from_config(twice)
    assert initialize_interactions_from_config(write(tmp_path / "0.yaml", "interaction: []")) == {}


def test_a_tool_without_execute_says_so() -> None:
    schema = OpenAIFunctionToolSchema.model_validate({"function": {"name": "x"}})
    with pytest.raises(NotImplementedError, match="execute"):
        asyncio.run(BaseTool({}, schema).execute("i", {}))


@pytest.mark.parametrize(
    "text",
    ["tools: [", 'tools: [{class_name: "\\ud800"}]', "tools:\n  - {class_name: a, config: 5}"],
)
def test_a_hostile_list_is_an_error_with_its_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ToolError, match=r"tools\.yaml"):
        load_all_tools(write(tmp_path / "tools.yaml", text), None)


def test_a_short_entry_is_a_built_in_tool_in_the_users_words(tmp_path: Path) -> None:
    text = """
tools:
  - name: calculator
    description: "does sums"
    parameters:
      expression:
        type: string
        description: "such as 23 * 45 + 67"
  - name: python
    description: "runs Python"
    parameters:
      source: {type: string}
  - name: calc_gsm8k_reward
"""
    tools = load_all_tools(write(tmp_path / "tools.yaml", text), None)
    assert [tool.name for tool in tools] == ["calculator", "python", "calc_gsm8k_reward"]
    assert tools[0].tool_schema.model_dump()["function"] == {
        "name": "calculator",
        "description": "does sums",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 23 * 45 + 67"}},
            "required": ["expression"],
        },
    }
    assert isinstance(tools[2], Gsm8kTool)


def test_classes_of_verl_are_those_of_the_same_path_here(tmp_path: Path) -> None:
    verl = LISTED.replace("hone.tools", "verl.tools")
    (tool,) = load_all_tools(write(tmp_path / "tools.yaml", verl), None)
    assert isinstance(tool, Gsm8kTool)
    missing = "tools:\n - class_name: verl.tools.geo3k_tool.Geo3kTool"
    with pytest.raises(PluginError, match=r"geo3k_tool\.Geo3kTool"):
        load_all_tools(write(tmp_path / "more.yaml", missing), None)
    missing = "tools:\n - class_name: verl.tools.nothing.Nothing"
    with pytest.raises(ModuleNotFoundError, match=r"hone has no 'verl\.tools\.nothing'"):
        load_all_tools(write(tmp_path / "none.yaml", missing), None)


def test_a_call_of_verls_schemas_is_read_from_its_text() -> None:
    read = OpenAIFunctionCallSchema.from_openai_function_parsed_schema
    good, bad = (OpenAIFunctionParsedSchema("f", text) for text in ('{"a": 1}', "[1]"))
    assert read(good) == (OpenAIFunctionCallSchema("f", {"a": 1}), False)
    assert read(bad) == (OpenAIFunctionCallSchema("f", {}), True)
    assert OpenAIFunctionToolCall(id="1", function=read(good)[0]).type == "function"


def test_the_python_tool_is_called_python_without_a_description_too(tmp_path: Path) -> None:
    path = write(tmp_path / "tools.yaml", "tools:\n - name: python\n - name: code_interpreter\n")
    assert [tool.name for tool in load_all_tools(path, None)] == ["python", "code_interpreter"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("class Mine(BaseInteraction):\n    pass", "`config` is an object of settings, got 'x'"),
        (
            "class Mine(BaseInteraction):\n    def __init__(self, config):\n        config['key']",
            "KeyError",
        ),
        ("class Mine:\n    def __init__(self, config):\n        pass", "is not an interaction"),
    ],
)
def test_an_interaction_that_cannot_be_made_is_named(tmp_path: Path, body: str, error: str) -> None:
    base = "from hone.interactions.base import BaseInteraction\n"
    file = write(tmp_path / "mine.py", f"{base}{body}\n")
    config = "x" if "pass" in body and "Base" in body else "{}"
    path = write(
        tmp_path / "i.yaml",
        f"interaction:\n  - class_name: {file}:Mine\n    config: {config}\n",
    )
    with pytest.raises(ToolError, match=error) as caught:
        initialize_interactions_from_config(path)
    assert path in str(caught.value)
