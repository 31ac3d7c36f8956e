"""The tools of a run: a YAML list of classes, and a Python file of decorated functions.

    tools:
      - class_name: hone.agents.tools.gsm8k.Gsm8kTool
        config: {type: native}
        tool_schema: {type: function, function: {name: …, description: …, parameters: …}}

Leaves out MCP servers: `type: mcp` is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.agents.tools.contract import BaseTool, OpenAIFunctionToolSchema, ToolError
from hone.agents.tools.function_tool import FunctionTool, is_function_tool
from hone.plugins import load_module, load_object
from hone.text import BadText, read_yaml, shown


def load_tools(tool_config_path: str | None, function_tool_path: str | None) -> dict[str, BaseTool]:
    """Every tool by the name its schema gives it."""
    found = [*_listed(tool_config_path), *_functions(function_tool_path)]
    tools: dict[str, BaseTool] = {}
    for tool in found:
        if tool.name in tools:
            raise ToolError(f"two tools are called {tool.name!r}; give each its own name")
        tools[tool.name] = tool
    return tools


def read_entries(path: str, section: str) -> list[dict[str, Any]]:
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


def _listed(path: str | None) -> list[BaseTool]:
    if not path:
        return []
    tools = []
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
        tools.append(tool)
    return tools


def _schema(entry: Mapping[str, Any], path: str) -> OpenAIFunctionToolSchema | None:
    schema = entry.get("tool_schema")
    if not schema:
        return None
    try:
        return OpenAIFunctionToolSchema.model_validate(schema)
    except (ToolError, AttributeError) as error:
        raise ToolError(f"{path}, {entry['class_name']}: {error}") from error


def _functions(path: str | None) -> list[BaseTool]:
    if not path:
        return []
    module = load_module(path)
    functions = {id(thing): thing for thing in vars(module).values() if is_function_tool(thing)}
    tools: list[BaseTool] = [FunctionTool(function) for function in functions.values()]
    if not tools:
        raise ToolError(
            f"{path} has no tool; put @function_tool (hone.agents.tools.function_tool) above a function"
        )
    return tools
