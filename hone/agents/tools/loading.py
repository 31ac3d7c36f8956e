"""Loads the tools and interactions of a run: YAML lists, and a Python file of decorated functions.

docs/agents.md describes both lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from hone.agents.interactions.contract import BaseInteraction
from hone.agents.interactions.environment import EnvironmentInteraction
from hone.agents.tools.contract import BaseTool, OpenAIFunctionToolSchema, ToolError
from hone.agents.tools.function_tool import FunctionTool, load_function_tools_from_path
from hone.agents.tools.mcp import mcp_tools
from hone.plugins import load_object
from hone.text import BadText, error_text, read_yaml, short_repr
from hone.types import Fields, JsonValue, Settings

BUILT_IN_CLASSES = {
    "calculator": "hone.agents.tools.calculator.CalculatorTool",
    "calc_gsm8k_reward": "hone.agents.tools.gsm8k.Gsm8kTool",
    "code_interpreter": "hone.agents.tools.code_interpreter.CodeInterpreterTool",
    "python": "hone.agents.tools.code_interpreter.PythonTool",
    "search": "hone.agents.tools.search.SearchTool",
}
"""Classes of the built-in tools, for entries without a `class_name`."""
_BUILT_IN_KEYS = {"name", "description", "parameters", "config"}
_MCP_CLASS = "hone.agents.tools.mcp.MCPBaseTool"
_ENVIRONMENT_CLASSES = {
    "reasoning_gym": "hone.agents.interactions.environment.ReasoningGymEnvironment",
    "verifiers": "hone.agents.interactions.verifiers.VerifiersEnvironment",
}
"""Classes of interactions whose name is `<library>:<environment>`, by library."""
Tool: TypeAlias = BaseTool | FunctionTool  # a tool object, or a function without state


def load_all_tools(
    tool_config_path: str | None = None, function_tool_path: str | None = None
) -> list[Tool]:
    """Returns the tools of a YAML list and of a Python file; their names must be unique."""
    listed_tools = initialize_tools_from_config(tool_config_path) if tool_config_path else []
    function_tools = load_function_tools_from_path(function_tool_path) if function_tool_path else []
    if function_tool_path and not function_tools:
        raise ToolError(
            f"{function_tool_path} has no tool; put @function_tool (hone.tools.function_tool) above "
            "a function"
        )
    listed_names = {tool.name for tool in listed_tools}
    duplicates = sorted(tool.name for tool in function_tools if tool.name in listed_names)
    if duplicates:
        raise ToolError(
            f"the function tools {duplicates} collide with tools of {tool_config_path}; rename them"
        )
    return [*listed_tools, *function_tools]


def read_entries(path: str, section: str) -> list[Fields]:
    """Returns the entries under `section` of a YAML file, each with a `class_name`."""
    try:
        data = read_yaml(path)
    except BadText as error:
        raise ToolError(str(error)) from error
    entries = data.get(section) if isinstance(data, Mapping) else None
    if not isinstance(entries, list) or (section == "tools" and not entries):
        raise ToolError(
            f"{path} has no list `{section}:` with entries of `class_name` and `config`"
        )
    return [_add_class_name(entry, path, section) for entry in entries]


def _add_class_name(entry: JsonValue, path: str, section: str) -> Fields:
    """Returns an entry with a `class_name`, which the file may omit for a built-in class."""
    if isinstance(entry, dict):
        name = entry.get("name")
        library, _, environment = str(name).partition(":")
        if entry.get("class_name"):
            return entry
        if section == "tools" and entry.get("mcp"):
            return {"class_name": _MCP_CLASS, **entry}
        if section == "tools" and name:
            return _built_in_tool(entry, path)
        if section == "interaction" and library in _ENVIRONMENT_CLASSES and environment:
            config = {"environment": environment, **_entry_config(entry, path)}
            return {**entry, "class_name": _ENVIRONMENT_CLASSES[library], "config": config}
    raise ToolError(f"{path}: every entry of `{section}` needs a `class_name`, got {entry}")


def _built_in_tool(entry: Fields, path: str) -> Fields:
    """Returns an entry of a built-in tool in the long form: `class_name`, `config`, `tool_schema`."""
    name = entry["name"]
    if not isinstance(name, str) or name not in BUILT_IN_CLASSES:
        raise ToolError(
            f"{path}: the tool {name!r} has no `class_name`, and the built-in tools are "
            f"{', '.join(BUILT_IN_CLASSES)}; write the class, or a function with @function_tool "
            "(multi_turn.function_tool_path)"
        )
    if unknown_keys := sorted({str(key) for key in entry} - _BUILT_IN_KEYS):
        raise ToolError(
            f"{path}, {name}: unknown key {unknown_keys[0]!r}; "
            f"use {', '.join(sorted(_BUILT_IN_KEYS))}"
        )
    tool: Fields = {"class_name": BUILT_IN_CLASSES[name], "config": entry.get("config")}
    if not {"description", "parameters"} & entry.keys():
        return tool
    parameters = entry.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise ToolError(f"{path}, {name}: `parameters` must map names to a type and a description")
    if "properties" not in parameters:
        parameters = {"type": "object", "properties": parameters, "required": list(parameters)}
    function = {"name": name, "description": entry.get("description"), "parameters": parameters}
    return tool | {"tool_schema": {"type": "function", "function": function}}


def initialize_tools_from_config(tools_config_file: str) -> list[BaseTool]:
    """Creates the tools of a YAML list."""
    path = tools_config_file
    tools: dict[str, BaseTool] = {}
    for entry in read_entries(path, "tools"):
        config = _entry_config(entry, path)
        tool_type = config.get("type", "mcp" if entry.get("mcp") else "native")
        if tool_type not in ("native", "mcp"):
            raise ToolError(
                f"{path}: tool type {tool_type!r} is not supported; use `native` or `mcp`"
            )
        cls = load_object(str(entry["class_name"]))
        if tool_type == "mcp":
            entry_tools = mcp_tools(cls, config, entry.get("mcp"), path)
        else:
            with _named_errors(entry, path):
                schema = entry.get("tool_schema")
                schema = OpenAIFunctionToolSchema.model_validate(schema) if schema else None
                entry_tools = [cls(config=config, tool_schema=schema)]
        for tool in entry_tools:
            if not hasattr(tool, "execute") or not getattr(tool, "name", None):
                raise ToolError(
                    f"{path}: {entry['class_name']} is not a tool; derive from "
                    "hone.tools.base_tool.BaseTool"
                )
            if tool.name in tools:
                raise ToolError(f"{path}: two tools are called {tool.name!r}; rename one of them")
            tools[tool.name] = tool
    return list(tools.values())


def initialize_interactions_from_config(
    interaction_config_file: str,
) -> dict[str, BaseInteraction]:
    """Creates the interactions of a YAML list; returns a dict by the names that rows use."""
    path = interaction_config_file
    interactions: dict[str, BaseInteraction] = {}
    for entry in read_entries(path, "interaction"):
        cls = load_object(str(entry["class_name"]))
        # The default name of `WeatherInteraction` is `weather`.
        name = str(entry.get("name") or cls.__name__.removesuffix("Interaction").lower())
        if name in interactions:
            raise ToolError(
                f"Duplicate interaction name {name!r} found in {path}; rename one of them"
            )
        config = {**_entry_config(entry, path), "name": name}
        is_interaction = isinstance(cls, type) and issubclass(cls, BaseInteraction)
        if not is_interaction and hasattr(cls, "reset") and hasattr(cls, "step"):
            interactions[name] = EnvironmentInteraction(cls, config)
        else:
            with _named_errors(entry, path):
                interactions[name] = cls(config)
            if not hasattr(interactions[name], "generate_response"):
                raise ToolError(
                    f"{path}: {entry['class_name']} is not an interaction; derive from "
                    "hone.interactions.base.BaseInteraction, or define reset and step"
                )
    return interactions


@contextmanager
def _named_errors(entry: Settings, path: str) -> Iterator[None]:
    """Converts errors of a tool's constructor, which may be user code, to a ToolError with its entry."""
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, ToolError) else error_text(error)
        raise ToolError(f"{path}, {entry['class_name']}: {reason}") from error


def _entry_config(entry: Settings, path: str) -> Settings:
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise ToolError(f"{path}: `config` is an object of settings, got {short_repr(config)}")
    return config
