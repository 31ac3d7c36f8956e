"""Parser of calls in Python syntax, as in Llama 3.2 and 4: `[add(a=1, b="two"), stop()]`."""

from __future__ import annotations

import math
import re

from hone.agents.parsers.contract import MAX_CALL_CHARS, ToolCall, ToolParser, bad_call
from hone.text import MAX_DEPTH
from hone.types import JsonValue

_LIST_START = re.compile(r"\s*(?:<\|python_start\|>\s*)?\[\s*[A-Za-z_][\w.-]*\s*\(")
_TOKEN = re.compile(
    r"""\s*(?:(?P<name>[A-Za-z_][\w.-]*)
    |(?P<number>[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)
    |(?P<string>"[^"\\]*(?:\\.[^"\\]*)*"|'[^'\\]*(?:\\.[^'\\]*)*')
    |(?P<punctuation>[][(){},:=]))""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)", re.DOTALL)
_ESCAPED_CHARACTERS = {"n": "\n", "t": "\t", "r": "\r"}
_CONSTANTS: dict[str, bool | None] = {"True": True, "False": False, "None": None}
_CONSTANTS |= {"true": True, "false": False, "null": None}


class PythonicToolParser(ToolParser):
    """Named `pythonic`: the whole turn is a list of calls."""

    def content(self, text: str) -> str:
        return ""

    def calls(self, text: str) -> list[ToolCall]:
        if not _LIST_START.match(text):
            return []
        try:
            return _CallListParser(text, text.index("[")).parse()
        except ValueError as error:
            return [bad_call(f"the calls are not [NAME(KEY=VALUE, …), …]: {error}")]


class _CallListParser:
    """A recursive-descent parser of a list of calls; a syntax error raises ValueError."""

    def __init__(self, text: str, start: int) -> None:
        self._text, self._position = text[: start + MAX_CALL_CHARS], start
        self._kind, self._token = "punctuation", ""
        self._advance()

    def _advance(self) -> str:
        """Returns the current token and moves to the next token."""
        token = self._token
        match = _TOKEN.match(self._text, self._position)
        self._kind = (match.lastgroup or "") if match else "end"
        self._token = match[self._kind] if match else ""
        self._position = match.end() if match else self._position
        return token

    def _expect(self, punctuation: str) -> None:
        """Moves past the current token; raises ValueError unless the token is `punctuation`."""
        if self._token != punctuation or self._kind != "punctuation":
            next_text = self._text[self._position : self._position + 20]
            raise ValueError(f"{punctuation!r} is missing before {next_text!r}")
        self._advance()

    def parse(self) -> list[ToolCall]:
        """Returns the calls of the list."""
        self._expect("[")
        calls = [self._parse_call()]
        while self._token == ",":
            self._expect(",")
            calls.append(self._parse_call())
        if self._token != "]":
            raise ValueError("']' is missing")
        return calls

    def _parse_call(self) -> ToolCall:
        if self._kind != "name":
            raise ValueError("a call begins with its name")
        name = self._advance()
        arguments: dict[str, JsonValue] = {}
        self._expect("(")
        while self._kind == "name":
            key = self._advance()
            self._expect("=")
            if key in arguments:
                raise ValueError(f"the argument {key} is repeated")
            arguments[key] = self._parse_value(0)
            if self._token != ",":
                break
            self._expect(",")
        self._expect(")")
        return ToolCall(name, arguments)

    def _parse_value(self, depth: int) -> JsonValue:
        if depth > MAX_DEPTH:
            raise ValueError(f"a value is nested more than {MAX_DEPTH} levels deep")
        kind, token = self._kind, self._advance()
        if kind == "name" and token in _CONSTANTS:
            return _CONSTANTS[token]
        if kind == "number":
            return _parse_number(token)
        if kind == "string":
            return _ESCAPE.sub(_unescape, token[1:-1])
        if kind == "punctuation" and token in ("[", "("):
            return self._parse_items(depth, "]" if token == "[" else ")")
        if kind == "punctuation" and token == "{":
            return self._parse_pairs(depth)
        raise ValueError(f"{token[:20]!r} is not a literal")

    def _parse_items(self, depth: int, closing: str) -> list[JsonValue]:
        items: list[JsonValue] = []
        while self._token != closing or self._kind != "punctuation":
            items.append(self._parse_value(depth + 1))
            if self._token != ",":
                break
            self._expect(",")
        self._expect(closing)
        return items

    def _parse_pairs(self, depth: int) -> dict[str, JsonValue]:
        pairs: dict[str, JsonValue] = {}
        while self._kind == "string":
            key = str(self._parse_value(depth + 1))
            self._expect(":")
            pairs[key] = self._parse_value(depth + 1)
            if self._token != ",":
                break
            self._expect(",")
        self._expect("}")
        return pairs


def _parse_number(token: str) -> int | float:
    if not set(token) & set(".eE"):
        return int(token)
    number = float(token)
    if not math.isfinite(number):
        raise ValueError(f"{token[:20]} is not a finite number")
    return number


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPED_CHARACTERS.get(code, code)
