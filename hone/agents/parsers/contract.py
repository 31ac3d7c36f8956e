"""The parser contract: a parser extracts the tool calls of a model turn (untrusted text)."""

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

MAX_CALL_CHARS = 65_536  # maximum length of a call; a longer call gets an `error` and is not parsed
STRING_TYPES = ("string", ["string", "null"], ["null", "string"])
"""JSON-schema types of text parameters, for which the argument `1999` is text, not a number."""
P = TypeVar("P", bound="type[ToolParser]")
Schemas = Sequence[OpenAIFunctionToolSchema]


@dataclass(frozen=True)
class ToolCall:
    """One call in the model's text; a call with an `error` is not run."""

    name: str
    arguments: Mapping[str, JsonValue]
    error: str | None = None
    tool_call_id: str | None = None


@dataclass
class FunctionCall:
    """A call as verl's parsers return it: `arguments` is JSON text."""

    name: str
    arguments: str
    tool_call_id: str | None = None


class ToolParser:
    """Parses the calls of one turn, in order.

    A parser implements `calls` (reads text) or verl's `extract_tool_calls` (reads token ids).
    """

    template_renders_tools = True
    """Whether the chat template renders tool schemas and tool answers; otherwise the parser does."""
    stop: tuple[str, ...] = ()  # strings that end a turn
    stop_tokens: tuple[str, ...] = ()  # special tokens that end a turn

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """The ids of the `stop_tokens` in the tokenizer's vocabulary."""
        if self.tokenizer is None or not self.stop_tokens:
            return []
        vocabulary = self.tokenizer.get_vocab()
        return [vocabulary[token] for token in self.stop_tokens if token in vocabulary]

    def calls(self, text: str) -> list[ToolCall]:
        """Returns every call in the text; a malformed call has an `error`."""
        if type(self).calls_with_schemas is ToolParser.calls_with_schemas:
            raise NotImplementedError(
                f"{type(self).__name__} has neither calls nor extract_tool_calls"
            )
        return self.calls_with_schemas((), text)

    def calls_with_schemas(self, tools: Schemas, text: str) -> list[ToolCall]:
        """Returns every call in the text; parsers that need the tool schemas override this method."""
        return self.calls(text)

    def content(self, text: str) -> str:
        """Returns the text of a turn with calls, without the calls."""
        return text

    def instructions(self, tools: Schemas) -> str:
        """Returns the text that describes the tools if the chat template does not render them."""
        raise NotImplementedError(f"{type(self).__name__} has no instructions")

    def observation(self, text: str, answers: Sequence[str]) -> str:
        """Formats the tool answers after a model turn `text`, if the template does not render them."""
        raise NotImplementedError(f"{type(self).__name__} has no observation")

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Schemas | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Returns the text without its calls, and the valid calls."""
        if self.tokenizer is None:
            raise ValueError(f"{type(self).__name__} needs a tokenizer")
        text = str(self.tokenizer.decode(responses_ids, skip_special_tokens=False))
        calls = [call for call in self.calls_with_schemas(tools or (), text) if call.error is None]
        return self.content(text) if calls else text, [as_function_call(call) for call in calls]

    async def parse(self, text: str, ids: Sequence[int], tools: Schemas) -> list[ToolCall]:
        """Returns the calls of a turn, from `extract_tool_calls` if the parser overrides it."""
        if type(self).extract_tool_calls is ToolParser.extract_tool_calls:
            return self.calls_with_schemas(tools, text)
        _, calls = await self.extract_tool_calls(list(ids), list(tools))
        return [
            as_tool_call(call.name, call.arguments, getattr(call, "tool_call_id", None))
            for call in calls
        ]

    @classmethod
    def register(cls, name: str) -> Callable[[P], P]:
        """Returns a decorator that registers a parser as `multi_turn.format=NAME`."""
        return PARSERS.register(name)

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Tokenizer) -> ToolParser:
        """Returns the parser with this name; raises ValueError if there is none."""
        return PARSERS.get(name)(tokenizer)


class DelimitedParser(ToolParser):
    """Parses calls between two delimiters, `opening` and `closing`."""

    opening: str
    closing: str

    def parse_body(self, body: str, tools: Schemas) -> list[ToolCall]:
        """Returns the calls in the text between two delimiters."""
        raise NotImplementedError

    def calls_with_schemas(self, tools: Schemas, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for body in texts_between(text, self.opening, self.closing):
            is_short = len(body) <= MAX_CALL_CHARS
            calls += self.parse_body(body, tools) if is_short else [bad_call(_TOO_LONG_ERROR)]
        if text.rfind(self.opening) > text.rfind(self.closing):
            calls.append(bad_call(f"the call is not closed with {self.closing}"))
        return calls

    def content(self, text: str) -> str:
        texts, start = [], 0
        for body in texts_between(text, self.opening, self.closing):
            call_start = text.index(self.opening, start)
            texts.append(text[start:call_start])
            start = call_start + len(self.opening) + len(body) + len(self.closing)
        return "".join([*texts, text[start:]])


_TOO_LONG_ERROR = f"the call is longer than {MAX_CALL_CHARS} characters"


def bad_call(reason: str) -> ToolCall:
    """Returns a call with an error."""
    return ToolCall("", {}, reason)


def as_function_call(call: ToolCall) -> FunctionCall:
    text = json.dumps(dict(call.arguments), ensure_ascii=False)
    return FunctionCall(call.name, text, call.tool_call_id)


def as_tool_call(name: str, arguments: JsonValue, tool_call_id: str | None = None) -> ToolCall:
    """Returns a call; `arguments` is an object or its JSON text."""
    if isinstance(arguments, str):
        if len(arguments) > MAX_CALL_CHARS:
            return ToolCall(name, {}, _TOO_LONG_ERROR, tool_call_id)
        try:
            arguments = read_json(arguments, strict=True)
        except BadText:
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "`arguments` is not a JSON object", tool_call_id)
    return ToolCall(name, arguments, tool_call_id=tool_call_id)


def parse_call(text: str) -> ToolCall:
    """Parses a JSON object with `name` and `arguments` (or `parameters`)."""
    if len(text) > MAX_CALL_CHARS:
        return bad_call(_TOO_LONG_ERROR)
    try:
        data = read_json(text, strict=True)
    except BadText as error:
        return bad_call(f"the call is not valid JSON: {error}")
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return bad_call('a call is a JSON object {"name": …, "arguments": {…}}')
    return as_tool_call(data["name"], data.get("arguments", data.get("parameters", {})))


def texts_between(text: str, opening: str, closing: str) -> Iterator[str]:
    """Yields the text between each opening delimiter and the next closing delimiter."""
    start = text.find(opening)
    while start >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            return
        yield text[start + len(opening) : end]
        start = text.find(opening, end + len(closing))


def parse_value(text: str, json_type: JsonValue = None) -> JsonValue:
    """Parses an argument as JSON; `null` becomes None; invalid JSON and string types stay text."""
    if text.lower() == "null":
        return None
    if json_type in STRING_TYPES:
        return text
    if json_type == "boolean":
        return text.lower() == "true"
    try:
        value: JsonValue = read_json(text, strict=True)
    except BadText:
        return text
    return value


def parameter_schemas(name: str, tools: Schemas) -> Mapping[str, JsonObject]:
    """Returns the JSON schemas of a tool's parameters; empty for an unknown tool."""
    for tool in tools:
        if tool.function.name == name:
            properties = tool.function.parameters.properties
            return {key: schema.model_dump() for key, schema in properties.items()}
    return {}


_JSON_MODULE, _TAGGED_MODULE = "hone.agents.parsers.json_calls", "hone.agents.parsers.tagged"
PARSERS: Table[Callable[..., ToolParser]] = Table(
    "tool-call parser",
    {
        "hermes": f"{_JSON_MODULE}:HermesToolParser",
        "qwen": f"{_JSON_MODULE}:HermesToolParser",
        "llama3_json": f"{_JSON_MODULE}:Llama3JsonToolParser",
        "mistral": f"{_JSON_MODULE}:MistralToolParser",
        "deepseek": f"{_JSON_MODULE}:DeepSeekToolParser",
        "kimi": f"{_JSON_MODULE}:KimiToolParser",
        "gpt-oss": f"{_JSON_MODULE}:GptOssToolParser",
        "harmony": f"{_JSON_MODULE}:GptOssToolParser",
        "plain": f"{_JSON_MODULE}:PlainToolParser",
        "qwen3_coder": f"{_TAGGED_MODULE}:Qwen3XMLToolParser",
        "glm": f"{_TAGGED_MODULE}:GLMToolParser",
        "pythonic": "hone.agents.parsers.pythonic:PythonicToolParser",
        "react": "hone.agents.parsers.react:ReactToolParser",
    },
)
