"""The tools of a run: a YAML list of classes, and a Python file of decorated functions.

    tools:
      - class_name: hone.agents.tools.gsm8k.Gsm8kTool
        config: {type: native}
        tool_schema: {type: function, function: {name: …, description: …, parameters: …}}

Leaves out MCP servers: `type: mcp` is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from hone.agents.tools.contract import BaseTool, OpenAIFunctionToolSchema, ToolError
from hone.agents.tools.function_tool import FunctionTool, load_function_tools_from_path
from hone.plugins import load_object
from hone.text import BadText, read_yaml, shown
from hone.types import Row, Settings

Tool: TypeAlias = BaseTool | FunctionTool
"""What a run may call: an object with state per trajectory, or a plain function."""


def load_all_tools(
    tool_config_path: str | None = None, function_tool_path: str | None = None
) -> list[Tool]:
    """The tools of a YAML list and those of a Python file; each has a name of its own."""
    listed = initialize_tools_from_config(tool_config_path) if tool_config_path else []
    functions = load_function_tools_from_path(function_tool_path) if function_tool_path else []
    if function_tool_path and not functions:
        raise ToolError(
            f"{function_tool_path} has no tool; put @function_tool "
            "(hone.tools.function_tool) above a function"
        )
    both = sorted({tool.name for tool in listed} & {tool.name for tool in functions})
    if both:
        raise ToolError(
            f"the function tools {both} collide with tools of {tool_config_path}; give each its own name"
        )
    return [*listed, *functions]


def read_entries(path: str, section: str) -> list[Row]:
    """The list under `section` of a YAML file, each entry with a `class_name`."""
    try:
        loaded = read_yaml(path)
    except BadText as error:
        raise ToolError(str(error)) from error
    entries = loaded.get(section) if isinstance(loaded, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ToolError(
            f"{path} has no list `{section}:` with entries of `class_name` and `config`"
        )
    for entry in entries:
        if not isinstance(entry, dict) or not entry.get("class_name"):
            raise ToolError(f"{path}: every entry of `{section}` needs a `class_name`, got {entry}")
    return entries


def initialize_tools_from_config(tools_config_file: str) -> list[BaseTool]:
    """The tools of a YAML list, made anew."""
    path = tools_config_file
    tools: dict[str, BaseTool] = {}
    for entry in read_entries(path, "tools"):
        config = entry.get("config") or {}
        if not isinstance(config, Mapping):
            raise ToolError(f"{path}: `config` is an object of settings, got {shown(config)}")
        kind = config.get("type", "native")
        if kind != "native":
            raise ToolError(
                f"{path}: tool type {kind!r} is not built; use `type: native` with a class of yours"
            )
        cls = load_object(str(entry["class_name"]))
        tool = cls(config=config, tool_schema=_schema(entry, path))
        if not hasattr(tool, "execute") or not getattr(tool, "name", None):
            raise ToolError(
                f"{path}: {entry['class_name']} is no tool; derive from hone.tools.base_tool.BaseTool"
            )
        if tool.name in tools:
            raise ToolError(f"{path}: two tools are called {tool.name!r}; give each its own name")
        tools[tool.name] = tool
    return list(tools.values())


def _schema(entry: Settings, path: str) -> OpenAIFunctionToolSchema | None:
    schema = entry.get("tool_schema")
    if not schema:
        return None
    try:
        return OpenAIFunctionToolSchema.model_validate(schema)
    except (ToolError, AttributeError) as error:
        raise ToolError(f"{path}, {entry['class_name']}: {error}") from error
