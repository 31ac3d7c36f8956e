"""Hermes-style calls: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, JSON and nothing else."""

from __future__ import annotations

from hone.agents.parsers.contract import (
    LONGEST_CALL,
    ToolCall,
    ToolParser,
    as_tool_call,
    between,
)
from hone.text import BadText, read_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesToolParser(ToolParser):
    def calls(self, text: str) -> list[ToolCall]:
        """Between each opening tag and the next closing one; a call that is never closed is none."""
        return [read_call(body) for body in between(text, OPEN, CLOSE)]

    def content(self, text: str) -> str:
        for body in between(text, OPEN, CLOSE):
            text = text.replace(f"{OPEN}{body}{CLOSE}", "", 1)
        return text


def read_call(body: str) -> ToolCall:
    """One JSON object with `name` and `arguments`; anything else is a call with an error."""
    if len(body) > LONGEST_CALL:
        return _bad(f"the call is longer than {LONGEST_CALL} characters")
    try:
        data = read_json(body, strict=True)
    except BadText as error:
        return _bad(f"the call is not valid JSON: {error}")
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return _bad('a call is a JSON object {"name": …, "arguments": {…}}')
    return as_tool_call(data["name"], data.get("arguments", {}))


def _bad(why: str) -> ToolCall:
    return ToolCall("", {}, why)
