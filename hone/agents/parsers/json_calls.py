"""Parsers of calls with JSON arguments: Hermes, Llama 3, Mistral, DeepSeek, Kimi K2, gpt-oss."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from hone.agents.parsers.contract import (
    DelimitedParser,
    Schemas,
    ToolCall,
    ToolParser,
    as_tool_call,
    bad_call,
    parse_call,
)

_DECODER = json.JSONDecoder()
_SEPARATOR = re.compile(r"(?:[\s;,]|<\|python_tag\|>)*")
_KIMI_ID = re.compile(r"(?:functions\.|call[-_])?(.+?)(?:[-_:]\d+)?")


class HermesToolParser(DelimitedParser):
    """Named `hermes`, `qwen`: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    opening, closing = "<tool_call>", "</tool_call>"

    def parse_body(self, body: str, tools: Schemas) -> list[ToolCall]:
        return [parse_call(body)]


class PlainToolParser(DelimitedParser):
    """Named `plain`: `<tool>NAME</tool><args>{…}</args>`."""

    opening, closing = "<tool>", "</args>"

    def parse_body(self, body: str, tools: Schemas) -> list[ToolCall]:
        name, _, arguments = body.partition("</tool>")
        arguments = arguments.strip()
        if not arguments.startswith("<args>"):
            return [bad_call("a call is <tool>NAME</tool><args>{…}</args>")]
        return [as_tool_call(name.strip(), arguments.removeprefix("<args>"))]


class DeepSeekToolParser(DelimitedParser):
    """Named `deepseek`: `NAME<｜tool▁sep｜>{…}`, or V3's `function<｜tool▁sep｜>NAME` and a JSON block."""

    opening, closing = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

    def parse_body(self, body: str, tools: Schemas) -> list[ToolCall]:
        name, separator, arguments = body.partition("<｜tool▁sep｜>")
        name_v3, fence, fenced_text = arguments.partition("```json")
        if fence:
            name, arguments = name_v3, fenced_text.rpartition("```")[0]
        if not separator:
            return [bad_call("a call is NAME<｜tool▁sep｜>{…}")]
        return [as_tool_call(name.strip(), arguments.strip())]


class KimiToolParser(DelimitedParser):
    """Named `kimi`: `functions.NAME:0<|tool_call_argument_begin|>{…}` between delimiters."""

    opening, closing = "<|tool_call_begin|>", "<|tool_call_end|>"
    stop_tokens = ("<|im_end|>",)

    def content(self, text: str) -> str:
        return text.partition("<|tool_calls_section_begin|>")[0]

    def parse_body(self, body: str, tools: Schemas) -> list[ToolCall]:
        call_id, _, arguments = body.partition("<|tool_call_argument_begin|>")
        call_id = call_id.strip()
        name = call_id.removeprefix("functions.").partition(":")[0]
        names = [tool.function.name for tool in tools]
        match = _KIMI_ID.fullmatch(call_id)
        if name not in names and match and match[1] in names:  # for example `call-add-0`
            name = match[1]
        return [as_tool_call(name, arguments.strip(), call_id)]


class GptOssToolParser(DelimitedParser):
    """Named `gpt-oss`, `harmony`: `… to=functions.NAME …<|message|>{…}<|call|>`."""

    opening, closing = " to=functions.", "<|call|>"
    stop_tokens = ("<|call|>",)

    def content(self, text: str) -> str:
        return text.partition("<|channel|>commentary to=functions.")[0]

    def calls_with_schemas(self, tools: Schemas, text: str) -> list[ToolCall]:
        # Outside a message's header, ` to=functions.` is ordinary text.
        message = text[text.rfind("<|end|>") + 1 :]
        has_call = self.opening in message.partition("<|message|>")[0]
        return super().calls_with_schemas(tools, message) if has_call else []

    def parse_body(self, body: str, tools: Schemas) -> list[ToolCall]:
        name, separator, arguments = body.partition("<|message|>")
        if not separator:
            return [bad_call("a call is to=functions.NAME<|message|>{…}<|call|>")]
        return [as_tool_call(name.partition("<|")[0].strip(), arguments)]


class Llama3JsonToolParser(ToolParser):
    """Named `llama3_json`: the turn, or its text after `<|python_tag|>`, is `{"name": …}; {…}`."""

    prefix = "<|python_tag|>"

    def content(self, text: str) -> str:
        text_before, prefix, _ = text.partition(self.prefix)
        has_only_calls = not prefix or text_before.lstrip().startswith("{")
        return "" if has_only_calls else text_before

    def calls(self, text: str) -> list[ToolCall]:
        text_before, prefix, body = text.partition(self.prefix)
        if text_before.lstrip().startswith("{"):  # a later prefix is part of an argument
            prefix, body = "", text
        calls = [parse_call(piece) for piece in _json_objects(body.lstrip())]
        if prefix:
            return calls or [bad_call('a call is a JSON object {"name": …, "parameters": {…}}')]
        return calls if '"name"' in body else []


class MistralToolParser(ToolParser):
    """Named `mistral`: `[TOOL_CALLS][{"name": …, "arguments": …}]` or `[TOOL_CALLS]NAME[ARGS]…`."""

    prefix = "[TOOL_CALLS]"

    def content(self, text: str) -> str:
        return text.partition(self.prefix)[0]

    def calls(self, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for call_text in text.split(self.prefix)[1:]:
            name, separator, arguments = call_text.partition("[ARGS]")
            has_name = bool(separator) and "{" not in name
            body = (arguments if has_name else call_text).lstrip()
            pieces = list(_json_objects(body.removeprefix("[").lstrip()))
            if not pieces:
                calls.append(bad_call('calls are a JSON list [{"name": …, "arguments": {…}}]'))
            elif has_name:
                calls.append(as_tool_call(name.partition("[CALL_ID]")[0].strip(), pieces[0]))
            else:
                calls += [parse_call(piece) for piece in pieces]
        return calls


def _json_objects(text: str) -> Iterator[str]:
    """Yields the text of each JSON object at the start of a text; the last may be invalid JSON."""
    start = 0
    while text.startswith("{", start):
        try:
            _, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = len(text)
        yield text[start:end]
        match = _SEPARATOR.match(text, end)
        start = match.end() if match else end
