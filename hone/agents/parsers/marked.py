"""Calls between special tokens: those of Kimi K2 and of gpt-oss."""

from __future__ import annotations

from hone.agents.parsers.contract import Schemas, ToolCall, ToolParser, as_tool_call, between
from hone.agents.parsers.tagged import token_ids

_SECTION = "<|tool_calls_section_begin|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_MESSAGE = "<|message|>"


class KimiToolParser(ToolParser):
    """Named `kimi`: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`."""

    @property
    def stop_token_ids(self) -> list[int]:
        return token_ids(self, "<|im_end|>")

    def content(self, text: str) -> str:
        return text.partition(_SECTION)[0]

    def calls_to(self, tools: Schemas, text: str) -> list[ToolCall]:
        found = []
        section = text.partition(_SECTION)[2]
        for body in between(section, "<|tool_call_begin|>", "<|tool_call_end|>"):
            call_id, _, arguments = body.partition(_ARGUMENTS)
            call_id = call_id.strip()
            found.append(as_tool_call(_kimi_name(call_id, tools), arguments.strip(), call_id))
        return found


def _kimi_name(call_id: str, tools: Schemas) -> str:
    """The tool that a call's id names: `functions.add:0` and `call-add-0` are `add`."""
    names = [tool.function.name for tool in tools]
    inside = [name for name in names if name in call_id]
    if call_id in names or not inside:
        return call_id.removeprefix("functions.").partition(":")[0]
    return max(inside, key=len)


class GptOssToolParser(ToolParser):
    """Named `gpt-oss`: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`."""

    def content(self, text: str) -> str:
        for body in between(text, "<|channel|>", "<|call|>"):
            text = text.replace(f"<|channel|>{body}<|call|>", "", 1)
        return text

    def calls_to(self, tools: Schemas, text: str) -> list[ToolCall]:
        found = []
        for body in between(text, " to=functions.", "<|call|>"):
            name, mark, arguments = body.partition(_MESSAGE)
            name = name.partition("<|")[0].strip()
            if mark and "<|end|>" not in arguments:  # else the mark stood in the model's reasoning
                found.append(as_tool_call(name, arguments))
        return found
