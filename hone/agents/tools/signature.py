"""Converts a function's signature and docstring to a JSON schema of its parameters.

Types come from annotations; descriptions from `Args:`, `:param name:` lines or `Annotated`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

from hone.agents.tools.contract import ToolError
from hone.types import Fields, Function

JsonSchema: TypeAlias = Fields  # the JSON schema of all parameters or of one

_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    tuple: "array",
    set: "array",
    Sequence: "array",
    dict: "object",
    Mapping: "object",
}
_ARGS_HEADING = re.compile(r"^(args|arguments|parameters|params)\s*:\s*$", re.IGNORECASE)
_OTHER_HEADING = re.compile(r"^(returns?|yields?|raises?|examples?|notes?)\s*:\s*$", re.IGNORECASE)
_ARGS_ENTRY = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_PARAM_FIELD = re.compile(r"^\s*:(?:param|parameter|arg)\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)$")


def parameters_schema(function: Function) -> JsonSchema:
    """Returns the JSON schema of the function's parameters."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        routine = function if inspect.isroutine(function) else type(function).__call__
        hints = get_type_hints(routine, include_extras=True)
        signature = inspect.signature(function)
    except (NameError, TypeError, ValueError) as error:
        raise ToolError(f"tool {name}: its signature cannot be read: {error}") from error
    descriptions = _argument_descriptions(function)
    properties: dict[str, JsonSchema] = {}
    required: list[str] = []
    for key, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ToolError(
                f"tool {name}: the variadic parameter *{key} is not supported; name each one"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ToolError(
                f"tool {name}: {key} is positional only, but a call names its arguments"
            )
        if key not in hints:
            raise ToolError(
                f"tool {name}: the argument {key} is missing a type hint; write {key}: str"
            )
        properties[key] = schema_of_type(hints[key])
        if descriptions.get(key):
            properties[key]["description"] = descriptions[key]
        if not properties[key].get("description"):
            raise ToolError(
                f"tool {name}: there is no description for the argument {key}; add a line "
                f"`{key}: …` under `Args:` in the docstring"
            )
        if parameter.default is parameter.empty:
            required.append(key)
    return {"type": "object", "properties": properties, "required": required}


def schema_of_type(hint: Any) -> JsonSchema:
    """Returns the JSON schema of an annotation; a type without a JSON type becomes a string."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        schema = schema_of_type(args[0])
        descriptions = [metadata for metadata in args[1:] if isinstance(metadata, str)]
        return schema | {"description": descriptions[0]} if descriptions else schema
    if origin in (Union, UnionType):
        members = [member for member in args if member is not NoneType]
        return schema_of_type(members[0]) if len(members) == 1 else _union_schema(members)
    if origin is Literal:
        values = [value for value in args if value is not None]
        return {**_union_schema([type(value) for value in values]), "enum": values}
    json_type = _JSON_TYPES.get(origin or hint, "string")
    item_types = [argument for argument in args if argument is not Ellipsis]
    if json_type == "array" and len(set(item_types)) == 1:
        return {"type": json_type, "items": schema_of_type(item_types[0])}
    return {"type": json_type}


def _union_schema(hints: Sequence[Any]) -> JsonSchema:
    json_types = list(dict.fromkeys(schema_of_type(hint)["type"] for hint in hints))
    return {"type": json_types[0] if len(json_types) == 1 else json_types}


def description_of(function: Function) -> str:
    """Returns the docstring up to its first section, such as `Args:` or `:param x:`."""
    lines: list[str] = []
    for line in _docstring_lines(function):
        if _ARGS_HEADING.match(line) or _OTHER_HEADING.match(line) or line.lstrip().startswith(":"):
            break
        lines.append(line)
    return "\n".join(lines).strip()


def _argument_descriptions(function: Function) -> dict[str, str]:
    """Returns the description of each parameter, from an `Args:` section or `:param` lines."""
    descriptions: dict[str, list[str]] = {}
    name: str | None = None
    entry_indent: int | None = None
    in_args = False
    for line in _docstring_lines(function):
        line_indent = len(line) - len(line.lstrip())
        if _ARGS_HEADING.match(line):
            in_args, entry_indent, name = True, None, None
        elif match := _PARAM_FIELD.match(line):
            name, in_args = match[1], False
            descriptions[name] = [match[2]]
        elif not line.strip():  # a blank line ends a `:param` description
            name = name if in_args else None
        elif line_indent == 0:
            in_args, name = False, None
        elif (
            in_args
            and (entry_indent is None or line_indent <= entry_indent)
            and (match := _ARGS_ENTRY.match(line))
        ):
            entry_indent = line_indent
            name = match[1]
            descriptions[name] = [match[2]]
        elif name is not None:
            descriptions[name].append(line.strip())
    return {key: " ".join(filter(None, texts)) for key, texts in descriptions.items()}


def _docstring_lines(function: Function) -> list[str]:
    return (inspect.getdoc(function) or "").splitlines()
