"""The tool contract: the function schema for the model, the methods of a tool, and their results.

For each trajectory, the tool loop calls `create`, `execute` once per tool call, `calc_reward` at the end
and `release`. A tool returns text, a ToolResponse or JSON data, alone or as (answer[, reward[, metrics]]).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, TypeAlias
from uuid import uuid4

import numpy as np

from hone.text import BadText, clean_text, clean_values, read_json, short_repr
from hone.types import Fields, JsonObject, JsonValue, Settings


class ToolError(ValueError):
    """A tool cannot be loaded or called; the message names the tool and the fix."""


@dataclass(frozen=True)
class ToolResponse:
    """The result of a call as the model sees it."""

    text: str | None = None
    image: list[Fields] | None = None
    video: list[Fields] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


ToolAnswer: TypeAlias = "JsonValue | ToolResponse"
"""The answer, which the model reads; values of other types are converted with `str`."""
ToolResult: TypeAlias = (
    "ToolAnswer | tuple[ToolAnswer] | tuple[ToolAnswer, float | None] "
    "| tuple[ToolAnswer, float | None, Settings | None]"
)
"""The value that a tool returns: answer[, reward[, metrics]]."""
CallResult: TypeAlias = tuple[ToolResponse, float, Fields]
"""The answer, reward and metrics of a call."""


@dataclass(frozen=True, kw_only=True)
class _Schema:
    """Base class of the schemas, which have pydantic's `model_dump` and `model_validate`."""

    def model_dump(self, **_: JsonValue) -> JsonObject:
        """Returns the schema as JSON, in the order of the fields and without null values."""
        fields = {name: _to_json(value) for name, value in vars(self).items() if value is not None}
        extra_keys = fields.pop("extra_keys", {})
        return fields | extra_keys


def _to_json(value: Any) -> Any:
    if isinstance(value, _Schema):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {name: _to_json(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True, kw_only=True)
class OpenAIFunctionPropertySchema(_Schema):
    """One parameter; other JSON Schema keys are stored in `extra_keys`."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[JsonValue] | None = None
    extra_keys: Settings = field(default_factory=dict)

    @staticmethod
    def model_validate(data: Settings) -> OpenAIFunctionPropertySchema:
        data = {} if isinstance(data, bool) else data  # JSON Schema allows true and false
        _require(data, Mapping, "a parameter of a tool schema is an object with a type")
        fields = {name: data[name] for name in ("type", "description", "enum") if name in data}
        extra_keys = {name: value for name, value in data.items() if name not in fields}
        return OpenAIFunctionPropertySchema(**fields, extra_keys=extra_keys)


@dataclass(frozen=True, kw_only=True)
class OpenAIFunctionParametersSchema(_Schema):
    """The parameters of a function, always an object."""

    type: str = "object"
    properties: Mapping[str, OpenAIFunctionPropertySchema] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    @staticmethod
    def model_validate(data: Settings) -> OpenAIFunctionParametersSchema:
        validate = OpenAIFunctionPropertySchema.model_validate
        _require(data, Mapping, "a tool schema's `parameters` is an object")
        properties, required = data.get("properties") or {}, data.get("required") or ()
        _require(properties, Mapping, "a tool schema's `properties` is an object")
        _require(required, list | tuple, "a tool schema's `required` is a list of names")
        if data.get("type", "object") != "object":
            raise ToolError(f"a tool schema's `parameters` has type object, got {data['type']!r}")
        for name in (*properties, *required):
            _require(name, str, "the name of a parameter is text")
        return OpenAIFunctionParametersSchema(
            properties={name: validate(schema) for name, schema in properties.items()},
            required=tuple(required),
        )


@dataclass(frozen=True, kw_only=True)
class OpenAIFunctionSchema(_Schema):
    """A function as the chat template renders it."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = OpenAIFunctionParametersSchema()

    @staticmethod
    def model_validate(data: Settings) -> OpenAIFunctionSchema:
        if not isinstance(data.get("name"), str) or not data["name"]:
            raise ToolError(f"a tool schema's `function` needs a `name`, got {dict(data)}")
        _require(data.get("description") or "", str, f"the description of {data['name']} is text")
        return OpenAIFunctionSchema(
            name=data["name"],
            description=data.get("description") or "",
            parameters=OpenAIFunctionParametersSchema.model_validate(data.get("parameters") or {}),
        )


@dataclass(frozen=True, kw_only=True)
class OpenAIFunctionToolSchema(_Schema):
    """The schema of a tool: `{"type": "function", "function": {...}}`."""

    type: str = "function"
    function: OpenAIFunctionSchema

    @staticmethod
    def model_validate(data: Settings) -> OpenAIFunctionToolSchema:
        if not isinstance(data, Mapping) or not isinstance(data.get("function"), Mapping):
            raise ToolError(
                f"a tool schema is {{type: function, function: {{name, …}}}}, got {data}"
            )
        function = OpenAIFunctionSchema.model_validate(data["function"])
        return OpenAIFunctionToolSchema(function=function)


def _require(value: object, expected_type: type | UnionType, rule: str) -> None:
    """Raises ToolError with this rule if the value has another type."""
    if not isinstance(value, expected_type):
        raise ToolError(f"{rule}, got {short_repr(value)}")


def function_schema(
    name: str, description: str, **properties: JsonObject
) -> OpenAIFunctionToolSchema:
    """Returns the schema of a function whose parameters are all required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


@dataclass(frozen=True)
class OpenAIFunctionParsedSchema:
    """A call as a model wrote it: `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class OpenAIFunctionCallSchema:
    """A call with its arguments as an object."""

    name: str
    arguments: JsonObject

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """Returns the call and whether parsing failed; a failed call has no arguments."""
        try:
            arguments = read_json(parsed_schema.arguments, strict=True)
        except BadText:
            arguments = None
        has_failed = not isinstance(arguments, dict)
        arguments = {} if has_failed else arguments
        return OpenAIFunctionCallSchema(parsed_schema.name, arguments), has_failed


@dataclass(frozen=True)
class OpenAIFunctionToolCall:
    """A call with its id, as in an assistant message."""

    id: str
    function: OpenAIFunctionCallSchema
    type: str = "function"


class BaseTool:
    """Base class of tools; one object serves all trajectories, which have different instance ids."""

    def __init__(
        self, config: Settings, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.config = dict(config)
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Returns the tool's own schema, for an entry of the tool list without `tool_schema`."""
        raise ToolError(
            f"{type(self).__name__} has no schema of its own; give `tool_schema` in the tool list, "
            "or override get_openai_tool_schema"
        )

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Creates the state of one trajectory; `kwargs` are the row's `create_kwargs`."""
        return instance_id or uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: JsonValue
    ) -> tuple[ToolResponse, float, Fields]:
        """Runs one call; returns the answer, its reward, and metrics."""
        raise NotImplementedError(f"{type(self).__name__} does not implement execute")

    async def calc_reward(self, instance_id: str, **kwargs: JsonValue) -> float:
        """Returns this tool's score of the finished trajectory."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: JsonValue) -> None:
        """Releases the trajectory's state."""


def to_tool_response(value: ToolResult) -> ToolResponse:
    """Converts an answer to a ToolResponse: dicts, lists, tuples and arrays become JSON."""
    if isinstance(value, ToolResponse):
        return value
    if isinstance(value, str):
        return ToolResponse(text=value)
    if isinstance(value, Mapping | list | tuple | np.ndarray):  # `str` would abbreviate long arrays
        return ToolResponse(text=json.dumps(clean_values(value), ensure_ascii=False))
    return ToolResponse(text="" if value is None else str(value))


def normalize_function_tool_return(result: ToolResult) -> CallResult:
    """Converts the result of a function tool; a tuple may be (answer, reward[, metrics]).

    A pair of two numbers or of two strings is data without a reward.
    """
    if not isinstance(result, tuple):
        return normalize_tool_return(result)
    if not 1 <= len(result) <= 3:
        raise TypeError(
            "a function tool returns (answer,), (answer, reward) or (answer, reward, metrics): a "
            f"tuple of length 1, 2, or 3, got {len(result)}; return a list if the answer is data"
        )
    answer, reward, metrics = (*result, None, None)[:3]
    is_number = isinstance(reward, int | float) or hasattr(reward, "dtype")
    is_result_tuple = len(result) == 1 or (
        isinstance(answer, str | ToolResponse | Mapping | list | None)
        and (reward is None or is_number)
        and isinstance(metrics, Mapping | None)
    )
    return normalize_tool_return(result) if is_result_tuple else (to_tool_response(result), 0.0, {})


def normalize_tool_return(result: ToolResult) -> CallResult:
    """Converts the result of `BaseTool.execute`: (answer[, reward[, metrics]])."""
    values = result if isinstance(result, tuple) else (result,)
    answer, reward, metrics = (*values, None, None)[:3]
    reward = 0.0 if reward is None else float(reward)
    if not math.isfinite(reward):
        raise ValueError(f"the reward of a call is {reward}; give a finite number")
    return to_tool_response(answer), reward, dict(metrics or {})


def response_text(response: ToolResponse) -> str:
    """Returns the text of a response, with lone surrogates replaced, as the model reads it."""
    return clean_text("" if response.text is None else str(response.text))
