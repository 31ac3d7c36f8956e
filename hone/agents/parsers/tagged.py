"""Calls whose arguments have a tag each: those of Qwen3-Coder and of GLM.

<tool_call><function=add><parameter=a>1</parameter></function></tool_call>
<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>
"""

from __future__ import annotations

from hone.agents.parsers.contract import (
    LONGEST_CALL,
    FunctionCall,
    Schemas,
    ToolCall,
    ToolParser,
    arguments_schema,
    as_function_call,
    between,
    value_of,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TOO_LONG = ToolCall("", {}, f"the call is longer than {LONGEST_CALL} characters")


class _TaggedParser(ToolParser):
    def content(self, text: str) -> str:
        return text.partition(OPEN)[0]


class Qwen3XMLToolParser(_TaggedParser):
    """Named `qwen3_coder`; the tool's schema says which arguments are text."""

    def calls_to(self, tools: Schemas, text: str) -> list[ToolCall]:
        found: list[ToolCall] = []
        for body in between(text, OPEN, CLOSE):
            for call in between(body, "<function=", "</function>"):
                found.append(_TOO_LONG if len(call) > LONGEST_CALL else _qwen3_call(call, tools))
        return found

    def _parse_xml_function_call(
        self, function_call_str: str, tools: Schemas | None
    ) -> FunctionCall | None:
        call = _qwen3_call(function_call_str, tools or ())
        return None if call.error else as_function_call(call)


def _qwen3_call(body: str, tools: Schemas) -> ToolCall:
    name, mark, rest = body.partition(">")
    if not mark:
        return ToolCall(
            "", {}, "a call is <function=NAME><parameter=KEY>VALUE</parameter></function>"
        )
    schema = arguments_schema(name, tools)
    arguments = {}
    for part in between(rest, "<parameter=", "</parameter>"):
        key, mark, value = part.partition(">")
        if mark:
            kind = schema.get(key, {}).get("type", "string")
            arguments[key] = value_of(value.removeprefix("\n").removesuffix("\n"), kind)
    return ToolCall(name, arguments)


class GLMToolParser(_TaggedParser):
    """Named `glm`; a value that is JSON is read as JSON."""

    @property
    def stop_token_ids(self) -> list[int]:
        return token_ids(self, "<|observation|>")

    def calls_to(self, tools: Schemas, text: str) -> list[ToolCall]:
        bodies = between(text, OPEN, CLOSE)
        return [_TOO_LONG if len(body) > LONGEST_CALL else _glm_call(body) for body in bodies]


def _glm_call(body: str) -> ToolCall:
    keys = between(body, "<arg_key>", "</arg_key>")
    values = between(body, "<arg_value>", "</arg_value>")
    pairs = zip(keys, values, strict=False)
    arguments = {key.strip(): value_of(value.strip()) for key, value in pairs}
    return ToolCall(body.partition("<arg_key>")[0].strip(), arguments)


def token_ids(parser: ToolParser, token: str) -> list[int]:
    """The id of a special token, where the tokenizer has it."""
    number = None if parser.tokenizer is None else parser.tokenizer.get_vocab().get(token)
    return [] if number is None else [number]
