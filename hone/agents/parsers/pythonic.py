"""Calls in Python syntax, as in Llama 3.2 and 4: the whole turn is `[add(a=1, b="two"), stop()]`.

Literals are parsed token by token: nothing is evaluated, and the time is linear in the text length.
"""

from __future__ import annotations

import math
import re

from hone.agents.parsers.contract import LONGEST_CALL, ToolCall, ToolParser, bad_call
from hone.text import MAX_DEPTH
from hone.types import JsonValue

_START = re.compile(r"\s*(?:<\|python_start\|>\s*)?\[\s*[A-Za-z_][\w.-]*\s*\(")
_TOKEN = re.compile(
    r"""\s*(?:(?P<name>[A-Za-z_][\w.-]*)
    |(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)
    |(?P<string>"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')
    |(?P<mark>[][(){},:=]))""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


class PythonicToolParser(ToolParser):
    """Named `pythonic`."""

    def content(self, text: str) -> str:
        return ""

    def calls(self, text: str) -> list[ToolCall]:
        if not _START.match(text):
            return []
        try:
            return _Reader(text, text.index("[")).calls()
        except ValueError as error:
            return [bad_call(f"the calls are not [NAME(KEY=VALUE, …), …]: {error}")]


class _Reader:
    """Parses a list of calls from the left; raises ValueError if the text is none."""

    def __init__(self, text: str, start: int) -> None:
        self._text, self._at = text[: start + LONGEST_CALL], start
        self._kind, self._token = "mark", ""
        self._next()

    def _next(self) -> str:
        """Returns the current token and reads the next one."""
        token = self._token
        match = _TOKEN.match(self._text, self._at)
        self._kind = (match.lastgroup or "") if match else "end"
        self._token = match[self._kind] if match else ""
        self._at = match.end() if match else self._at
        return token

    def _take(self, mark: str) -> None:
        if self._token != mark or self._kind != "mark":
            rest = self._text[self._at : self._at + 20]
            raise ValueError(f"{mark!r} is missing before {rest!r}")
        self._next()

    def calls(self) -> list[ToolCall]:
        self._take("[")
        calls = [self._call()]
        while self._token == ",":
            self._take(",")
            calls.append(self._call())
        if self._token != "]":
            raise ValueError("']' is missing")
        return calls

    def _call(self) -> ToolCall:
        if self._kind != "name":
            raise ValueError("a call begins with its name")
        name = self._next()
        arguments: dict[str, JsonValue] = {}
        self._take("(")
        while self._kind == "name":
            key = self._next()
            self._take("=")
            if key in arguments:
                raise ValueError(f"{key} is given twice")
            arguments[key] = self._value(0)
            if self._token != ",":
                break
            self._take(",")
        self._take(")")
        return ToolCall(name, arguments)

    def _value(self, depth: int) -> JsonValue:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
        kind, token = self._kind, self._next()
        if kind == "name" and token in _WORDS:
            return _WORDS[token]
        if kind == "number":
            return _number(token)
        if kind == "string":
            return _ESCAPE.sub(_escaped, token[1:-1])
        if kind == "mark" and token in ("[", "("):
            return self._items(depth, "]" if token == "[" else ")")
        if kind == "mark" and token == "{":
            return self._pairs(depth)
        raise ValueError(f"{token[:20]!r} is no literal")

    def _items(self, depth: int, closing: str) -> list[JsonValue]:
        items: list[JsonValue] = []
        while self._token != closing or self._kind != "mark":
            items.append(self._value(depth + 1))
            if self._token != ",":
                break
            self._take(",")
        self._take(closing)
        return items

    def _pairs(self, depth: int) -> dict[str, JsonValue]:
        pairs: dict[str, JsonValue] = {}
        while self._kind == "string":
            key = str(self._value(depth + 1))
            self._take(":")
            pairs[key] = self._value(depth + 1)
            if self._token != ",":
                break
            self._take(",")
        self._take("}")
        return pairs


def _number(token: str) -> int | float:
    if not set(token) & set(".eE"):
        return int(token)
    if not math.isfinite(number := float(token)):
        raise ValueError(f"{token[:20]} is no finite number")
    return number


def _escaped(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, code)
