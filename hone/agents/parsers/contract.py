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

    in_template = True
    """The chat template shows tools and answers; otherwise `instructions` and `observation` do."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn for its calls to be made."""

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

    def instructions(self, tools: Schemas) -> str:
        """What the prompt says of the tools, where the chat template does not show them."""
        raise NotImplementedError(f"{type(self).__name__} leaves the tools to the chat template")

    def observation(self, text: str, answers: Sequence[str]) -> str:
        """What follows the model's text, where the chat template does not show answers."""
        raise NotImplementedError(f"{type(self).__name__} leaves answers to the chat template")

    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Schemas | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """The text without its calls, and the calls that can be made."""
        if self.tokenizer is None:
            raise ValueError(f"{type(self).__name__} was made without a tokenizer")
        text = str(self.tokenizer.decode(responses_ids, skip_special_tokens=False))
        calls = [call for call in self.calls_to(tools or (), text) if call.error is None]
        return self.content(text) if calls else text, [as_function_call(call) for call in calls]

    async def read(self, text: str, ids: Sequence[int], tools: Schemas) -> list[ToolCall]:
        """The calls of a turn, by whichever of the two the parser writes."""
        if type(self).extract_tool_calls is ToolParser.extract_tool_calls:
            return self.calls_to(tools, text)
        _, calls = await self.extract_tool_calls(list(ids), list(tools))
        return [as_tool_call(c.name, c.arguments, getattr(c, "tool_call_id", None)) for c in calls]

    @classmethod
    def register(cls, name: str) -> Callable[[P], P]:
        """Decorator: make a parser known as `multi_turn.format=NAME`."""
        return PARSERS.register(name)

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Tokenizer) -> ToolParser:
        """A parser of this name; ValueError where there is none."""
        return PARSERS.get(name)(tokenizer)

    def _token_ids(self, token: str) -> list[int]:
        """The id of a special token, where the tokenizer has it."""
        number = None if self.tokenizer is None else self.tokenizer.get_vocab().get(token)
        return [] if number is None else [number]


class MarkedParser(ToolParser):
    """Calls between two marks; a format names the marks and reads what stands between them."""

    opening: str
    closing: str

    def body(self, body: str, tools: Schemas) -> list[ToolCall]:
        """The calls of one marked text."""
        raise NotImplementedError

    def calls(self, text: str) -> list[ToolCall]:
        return self.calls_to((), text)

    def calls_to(self, tools: Schemas, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for body in between(text, self.opening, self.closing):
            calls += self.body(body, tools) if len(body) <= LONGEST_CALL else [bad_call(_TOO_LONG)]
        if text.rfind(self.opening) > text.rfind(self.closing):
            calls.append(bad_call(f"the call is not closed with {self.closing}"))
        return calls

    def content(self, text: str) -> str:
        parts, start = [], 0
        for body in between(text, self.opening, self.closing):
            begin = text.index(self.opening, start)
            parts.append(text[start:begin])
            start = begin + len(self.opening) + len(body) + len(self.closing)
        return "".join([*parts, text[start:]])


_TOO_LONG = f"the call is longer than {LONGEST_CALL} characters"


def bad_call(reason: str) -> ToolCall:
    """A call that cannot be made."""
    return ToolCall("", {}, reason)


def as_function_call(call: ToolCall) -> FunctionCall:
    text = json.dumps(dict(call.arguments), ensure_ascii=False)
    return FunctionCall(call.name, text, call.tool_call_id)


def as_tool_call(name: str, arguments: JsonValue, tool_call_id: str | None = None) -> ToolCall:
    """A call of its name and an object of arguments, which may be JSON text."""
    if isinstance(arguments, str):
        if len(arguments) > LONGEST_CALL:
            return ToolCall(name, {}, _TOO_LONG)
        try:
            arguments = read_json(arguments, strict=True)
        except BadText:
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, "`arguments` is not a JSON object", tool_call_id)
    return ToolCall(name, arguments, tool_call_id=tool_call_id)


def read_call(text: str) -> ToolCall:
    """One JSON object with `name` and `arguments` (or `parameters`), else a call with an error."""
    if len(text) > LONGEST_CALL:
        return bad_call(_TOO_LONG)
    try:
        data = read_json(text, strict=True)
    except BadText as error:
        return bad_call(f"the call is not valid JSON: {error}")
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return bad_call('a call is a JSON object {"name": …, "arguments": {…}}')
    return as_tool_call(data["name"], data.get("arguments", data.get("parameters", {})))


def between(text: str, opening: str, closing: str) -> Iterator[str]:
    """What stands between each opening mark and the next closing one."""
    start = text.find(opening)
    while start >= 0:
        end = text.find(closing, start + len(opening))
        if end < 0:
            return
        yield text[start + len(opening) : end]
        start = text.find(opening, end + len(closing))


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


_JSON, _TAGGED = "hone.agents.parsers.json_calls", "hone.agents.parsers.tagged"
PARSERS: Table[Callable[..., ToolParser]] = Table(
    "tool-call parser",
    {
        "hermes": f"{_JSON}:HermesToolParser",
        "qwen": f"{_JSON}:HermesToolParser",
        "llama3_json": f"{_JSON}:Llama3JsonToolParser",
        "mistral": f"{_JSON}:MistralToolParser",
        "deepseek": f"{_JSON}:DeepSeekToolParser",
        "kimi": f"{_JSON}:KimiToolParser",
        "gpt-oss": f"{_JSON}:GptOssToolParser",
        "harmony": f"{_JSON}:GptOssToolParser",
        "plain": f"{_JSON}:PlainToolParser",
        "qwen3_coder": f"{_TAGGED}:Qwen3XMLToolParser",
        "glm": f"{_TAGGED}:GLMToolParser",
        "pythonic": "hone.agents.parsers.pythonic:PythonicToolParser",
        "react": "hone.agents.parsers.react:ReactToolParser",
    },
)
