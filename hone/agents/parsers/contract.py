"""The parser contract: a turn's text to the calls in it. Model text is hostile: it is read, never run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hone.agents.tools.contract import OpenAIFunctionToolSchema
from hone.plugins import Table
from hone.text import BadText, read_json
from hone.tokenizer import Tokenizer
from hone.types import JsonObject, JsonValue

LONGEST_CALL = 65_536
"""Characters of one call; more is refused unread."""
P = TypeVar("P", bound="type[ToolParser]")
Schemas = Sequence[OpenAIFunctionToolSchema]


@dataclass(frozen=True)
class ToolCall:
    """One call the model asked for; `error` says why it cannot be made."""

    name: str
    arguments: Mapping[str, JsonValue]
    error: str | None = None
    tool_call_id: str | None = None


@dataclass
class FunctionCall:
    """A call as verl's parsers give it: `arguments` is JSON text."""

    name: str
    arguments: str
    tool_call_id: str | None = None


class ToolParser:
    """Finds the calls of one turn, in order.

    A parser writes `calls`, which reads text, or verl's `extract_tool_calls`, which reads token ids.
    """

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a turn for its calls to be made; none where the model ends it itself."""
        return []

    def calls(self, text: str) -> list[ToolCall]:
        """Every call in the text; a malformed one comes back with its `error`."""
        raise NotImplementedError(f"{type(self).__name__} has neither calls nor extract_tool_calls")

    def calls_to(self, tools: Schemas, text: str) -> list[ToolCall]:
        """`calls`, for a parser that must know the tools to read the text."""
        return self.calls(text)

    def content(self, text: str) -> str:
        """The text without its calls."""
        return text

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Schemas | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """The text without its calls, and the calls that can be made."""
        if self.tokenizer is None:
            raise ValueError(f"{type(self).__name__} was made without a tokenizer")
        text = str(self.tokenizer.decode(responses_ids, skip_special_tokens=False))
        found = [call for call in self.calls_to(tools or (), text) if call.error is None]
        return self.content(text) if found else text, [as_function_call(call) for call in found]

    async def read(self, text: str, ids: Sequence[int], tools: Schemas) -> list[ToolCall]:
        """The calls of a turn, by whichever of the two the parser writes."""
        if type(self).extract_tool_calls is ToolParser.extract_tool_calls:
            return self.calls_to(tools, text)
        _, found = await self.extract_tool_calls(list(ids), list(tools))
        return [as_tool_call(c.name, c.arguments, getattr(c, "tool_call_id", None)) for c in found]

    @classmethod
    def register(cls, name: str) -> Callable[[P], P]:
        """Decorator: make a parser known as `multi_turn.format=NAME`."""
        return PARSERS.register(name)

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Tokenizer) -> ToolParser:
        """A parser of this name; ValueError where there is none."""
        return PARSERS.get(name)(tokenizer)


def as_function_call(call: ToolCall) -> FunctionCall:
    text = json.dumps(dict(call.arguments), ensure_ascii=False)
    return FunctionCall(call.name, text, call.tool_call_id)


def as_tool_call(name: str, arguments: JsonValue, tool_call_id: str | None = None) -> ToolCall:
    """A call of its name and an object of arguments, which may be JSON text."""
    if isinstance(arguments, str):
        if len(arguments) > LONGEST_CALL:
            return ToolCall(name, {}, f"the call is longer than {LONGEST_CALL} characters")
        try:
            arguments = read_json(arguments, strict=True)
        except BadText:
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "`arguments` is not a JSON object", tool_call_id)
    return ToolCall(name, arguments, tool_call_id=tool_call_id)


def between(text: str, opening: str, closing: str) -> Iterator[str]:
    """What stands between each opening mark and the next closing one."""
    start = text.find(opening)
    while start >= 0:
        end = text.find(closing, start)
        if end < 0:
            return
        yield text[start + len(opening) : end]
        start = text.find(opening, end)


def value_of(text: str, kind: JsonValue = None) -> JsonValue:
    """The value of an argument written as plain text: JSON where it is that, unless text is asked for."""
    if text.lower() == "null":
        return None
    if kind == "string":
        return text
    if kind == "boolean":
        return text.lower() == "true"
    try:
        value: JsonValue = read_json(text, strict=True)
    except BadText:
        return text
    return value


def arguments_schema(name: str, tools: Schemas) -> Mapping[str, JsonObject]:
    """The parameters of the tool of a name, as JSON schemas; none where it is not among the tools."""
    for tool in tools:
        if tool.function.name == name:
            properties = tool.function.parameters.properties
            return {key: schema.model_dump() for key, schema in properties.items()}
    return {}


PARSERS: Table[Callable[..., ToolParser]] = Table(
    "tool-call parser",
    {
        "hermes": "hone.agents.parsers.hermes:HermesToolParser",
        "qwen3_coder": "hone.agents.parsers.tagged:Qwen3XMLToolParser",
        "glm": "hone.agents.parsers.tagged:GLMToolParser",
        "kimi": "hone.agents.parsers.marked:KimiToolParser",
        "gpt-oss": "hone.agents.parsers.marked:GptOssToolParser",
    },
)
