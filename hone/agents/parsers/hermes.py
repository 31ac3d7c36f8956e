"""Hermes-style calls: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, JSON and nothing else."""

from __future__ import annotations

from hone.agents.parsers.contract import ToolCall, ToolParser
from hone.text import BadText, read_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
LONGEST_CALL = 65_536
"""Characters of one call; more is refused unread."""


class HermesParser(ToolParser):
    def calls(self, text: str) -> list[ToolCall]:
        """Between each opening tag and the next closing one; a call that is never closed is none."""
        found: list[ToolCall] = []
        at = text.find(OPEN)
        while at >= 0:
            end = text.find(CLOSE, at)
            if end < 0:
                break
            found.append(read_call(text[at + len(OPEN) : end]))
            at = text.find(OPEN, end)
        return found


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
    arguments = data.get("arguments", {})
    if isinstance(arguments, str):  # some models write the object as a JSON string
        try:
            arguments = read_json(arguments, strict=True)
        except BadText:
            arguments = None
    if not isinstance(arguments, dict):
        return ToolCall(data["name"], {}, "`arguments` is not a JSON object")
    return ToolCall(data["name"], arguments)


def _bad(why: str) -> ToolCall:
    return ToolCall("", {}, why)
