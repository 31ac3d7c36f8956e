"""The tool contract: what a tool shows the model (an OpenAI function schema) and what it promises.

One instance of state a trajectory: `create`, `execute` as often as the model calls, `calc_reward` at the
end, `release`. How calls are bounded and answered is the tool loop's business, not a tool's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from hone.text import BadText, read_json
from hone.types import JsonObject, JsonValue, Row, Settings


class ToolError(ValueError):
    """A tool that cannot be listed or called; the message says which and what to write."""


@dataclass(frozen=True)
class ToolResponse:
    """What the model sees of a call."""

    text: str | None = None
    image: list[Row] | None = None
    video: list[Row] | None = None

    def is_empty(self) -> bool:
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        return bool(self.text) and not (self.image or self.video)


@dataclass(frozen=True)
class OpenAIFunctionPropertySchema:
    """One parameter; keys of JSON Schema beyond these stay in `more`."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[JsonValue] | None = None
    more: Settings = field(default_factory=dict)

    @staticmethod
    def model_validate(data: Settings) -> OpenAIFunctionPropertySchema:
        own = {name: data[name] for name in ("type", "description", "enum") if name in data}
        more = {name: value for name, value in data.items() if name not in own}
        return OpenAIFunctionPropertySchema(**own, more=more)

    def model_dump(self, **_: JsonValue) -> JsonObject:
        own = {"type": self.type, "description": self.description, "enum": self.enum}
        return {**{k: v for k, v in own.items() if v is not None}, **self.more}


@dataclass(frozen=True)
class OpenAIFunctionParametersSchema:
    """The parameters of a function: always an object."""

    properties: Mapping[str, OpenAIFunctionPropertySchema] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    type: str = "object"

    @staticmethod
    def model_validate(data: Settings) -> OpenAIFunctionParametersSchema:
        read = OpenAIFunctionPropertySchema.model_validate
        return OpenAIFunctionParametersSchema(
            properties={k: read(v) for k, v in (data.get("properties") or {}).items()},
            required=tuple(data.get("required") or ()),
        )

    def model_dump(self, **_: JsonValue) -> JsonObject:
        return {
            "type": self.type,
            "properties": {name: p.model_dump() for name, p in self.properties.items()},
            "required": list(self.required),
        }


@dataclass(frozen=True)
class OpenAIFunctionSchema:
    """A function as the chat template shows it."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = field(
        default_factory=OpenAIFunctionParametersSchema
    )

    @staticmethod
    def model_validate(data: Settings) -> OpenAIFunctionSchema:
        if not isinstance(data.get("name"), str) or not data["name"]:
            raise ToolError(f"a tool schema's `function` needs a `name`, got {dict(data)}")
        return OpenAIFunctionSchema(
            name=data["name"],
            description=data.get("description") or "",
            parameters=OpenAIFunctionParametersSchema.model_validate(data.get("parameters") or {}),
        )

    def model_dump(self, **_: JsonValue) -> JsonObject:
        return {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters.model_dump(),
        }


@dataclass(frozen=True)
class OpenAIFunctionToolSchema:
    """`{"type": "function", "function": {...}}`, read with `model_validate`, written with `model_dump`."""

    function: OpenAIFunctionSchema
    type: str = "function"

    @staticmethod
    def model_validate(data: Settings) -> OpenAIFunctionToolSchema:
        if not isinstance(data.get("function"), Mapping):
            raise ToolError(
                f"a tool schema is {{type: function, function: {{name, …}}}}, got {data}"
            )
        return OpenAIFunctionToolSchema(OpenAIFunctionSchema.model_validate(data["function"]))

    def model_dump(self, **_: JsonValue) -> JsonObject:
        return {"type": self.type, "function": self.function.model_dump()}


def function_schema(
    name: str, description: str, **properties: JsonObject
) -> OpenAIFunctionToolSchema:
    """The schema of a function that needs all its parameters."""
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
        """The call, and whether its arguments could not be read; then it has none."""
        try:
            arguments = read_json(parsed_schema.arguments, strict=True)
        except BadText:
            arguments = None
        is_object = isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(
            parsed_schema.name, arguments if is_object else {}
        ), not is_object


@dataclass(frozen=True)
class OpenAIFunctionToolCall:
    """A call with its id, as messages of an assistant hold it."""

    id: str
    function: OpenAIFunctionCallSchema
    type: str = "function"


class BaseTool:
    """Base of every tool. One object serves all trajectories; what differs hangs on `instance_id`."""

    def __init__(
        self, config: Settings, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self.config = dict(config)
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """The schema where the list gives none."""
        raise ToolError(
            f"{type(self).__name__} has no schema of its own; give `tool_schema` in the tool list, or "
            "override get_openai_tool_schema"
        )

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin the state of one trajectory; `kwargs` are the row's `create_kwargs`."""
        return instance_id or uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: JsonValue
    ) -> tuple[ToolResponse, float, Row]:
        """One call: the answer, its reward, and facts to keep."""
        raise NotImplementedError(f"{type(self).__name__} does not say what a call does (execute)")

    async def calc_reward(self, instance_id: str, **kwargs: JsonValue) -> float:
        """The trajectory's score by this tool, at its end."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: JsonValue) -> None:
        """Forget the trajectory's state."""
