"""Calls whose arguments are JSON: the formats of Hermes and Qwen, Llama 3, Mistral, DeepSeek, Kimi K2 and
gpt-oss, and plain tags."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from hone.agents.parsers.contract import (
    MarkedParser,
    Schemas,
    ToolCall,
    ToolParser,
    as_tool_call,
    bad_call,
    read_call,
)

_DECODER = json.JSONDecoder()
_SEPARATOR = re.compile(r"[\s;,]*")


class HermesToolParser(MarkedParser):
    """Named `hermes`, `qwen`: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

    opening, closing = "<tool_call>", "</tool_call>"

    def body(self, body: str, tools: Schemas) -> list[ToolCall]:
        return [read_call(body)]


class PlainToolParser(MarkedParser):
    """Named `plain`: `<tool>NAME</tool><args>{…}</args>`."""

    opening, closing = "<tool>", "</args>"

    def body(self, body: str, tools: Schemas) -> list[ToolCall]:
        name, _, rest = body.partition("</tool>")
        rest = rest.strip()
        if not rest.startswith("<args>"):
            return [bad_call("a call is <tool>NAME</tool><args>{…}</args>")]
        return [as_tool_call(name.strip(), rest.removeprefix("<args>"))]


class DeepSeekToolParser(MarkedParser):
    """Named `deepseek`: `NAME<｜tool▁sep｜>{…}`, or V3's `function<｜tool▁sep｜>NAME` with a JSON block."""

    opening, closing = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

    def body(self, body: str, tools: Schemas) -> list[ToolCall]:
        name, mark, rest = body.partition("<｜tool▁sep｜>")
        head, block, fenced = rest.partition("```json")
        if block:
            name, rest = head, fenced.rpartition("```")[0]
        if not mark:
            return [bad_call("a call is NAME<｜tool▁sep｜>{…}")]
        return [as_tool_call(name.strip(), rest.strip())]


class KimiToolParser(MarkedParser):
    """Named `kimi`: `functions.NAME:0<|tool_call_argument_begin|>{…}` between its marks."""

    opening, closing = "<|tool_call_begin|>", "<|tool_call_end|>"

    @property
    def stop_token_ids(self) -> list[int]:
        return self._token_ids("<|im_end|>")

    def content(self, text: str) -> str:
        return text.partition("<|tool_calls_section_begin|>")[0]

    def body(self, body: str, tools: Schemas) -> list[ToolCall]:
        call_id, _, arguments = body.partition("<|tool_call_argument_begin|>")
        call_id = call_id.strip()
        names = [tool.function.name for tool in tools]
        inside = [name for name in names if name in call_id]
        name = call_id.removeprefix("functions.").partition(":")[0]
        if inside and call_id not in names:  # `functions.add:0` and `call-add-0` are `add`
            name = max(inside, key=len)
        return [as_tool_call(name, arguments.strip(), call_id)]


class GptOssToolParser(MarkedParser):
    """Named `gpt-oss`, `harmony`: `<|channel|>commentary to=functions.NAME …<|message|>{…}<|call|>`."""

    opening, closing = " to=functions.", "<|call|>"

    @property
    def stop_token_ids(self) -> list[int]:
        return self._token_ids("<|call|>")

    def content(self, text: str) -> str:
        return text.partition("<|channel|>commentary to=functions.")[0]

    def calls_to(self, tools: Schemas, text: str) -> list[ToolCall]:
        # Outside a message's header the mark is ordinary text.
        message = text[text.rfind("<|end|>") + 1 :]
        is_call = self.opening in message.partition("<|message|>")[0]
        return super().calls_to(tools, message) if is_call else []

    def body(self, body: str, tools: Schemas) -> list[ToolCall]:
        name, mark, arguments = body.partition("<|message|>")
        if not mark:
            return [bad_call("a call is to=functions.NAME<|message|>{…}<|call|>")]
        return [as_tool_call(name.partition("<|")[0].strip(), arguments)]


class Llama3JsonToolParser(ToolParser):
    """Named `llama3_json`: `{"name": …, "parameters": {…}}` as the whole turn, or after `<|python_tag|>`;
    several are separated by `;`."""

    mark = "<|python_tag|>"

    def content(self, text: str) -> str:
        return text.partition(self.mark)[0] if self.mark in text else ""

    def calls(self, text: str) -> list[ToolCall]:
        _, mark, body = text.rpartition(self.mark)
        calls = [read_call(piece) for piece in _objects(body.lstrip())]
        if mark:
            return calls or [bad_call('a call is a JSON object {"name": …, "parameters": {…}}')]
        return calls if '"name"' in body else []


class MistralToolParser(ToolParser):
    """Named `mistral`: `[TOOL_CALLS] [{"name": …, "arguments": {…}}]`, or `[TOOL_CALLS]NAME[ARGS]{…}`."""

    mark = "[TOOL_CALLS]"

    def content(self, text: str) -> str:
        return text.partition(self.mark)[0]

    def calls(self, text: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        for part in text.split(self.mark)[1:]:
            name, mark, arguments = part.partition("[ARGS]")
            body = (arguments if mark else part).lstrip()
            pieces = list(_objects(body.removeprefix("[").lstrip()))
            if not pieces:
                calls.append(bad_call('calls are a JSON list [{"name": …, "arguments": {…}}]'))
            elif mark:
                calls.append(as_tool_call(name.partition("[CALL_ID]")[0].strip(), pieces[0]))
            else:
                calls += [read_call(piece) for piece in pieces]
        return calls


def _objects(text: str) -> Iterator[str]:
    """Yields the JSON objects at the start of a text, each as text; the last may be invalid."""
    at = 0
    while text.startswith("{", at):
        try:
            _, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = len(text)
        yield text[at:end]
        match = _SEPARATOR.match(text, end)
        at = match.end() if match else end
