"""Calls are JSON between tags; anything else between the tags is a call with an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.agents.parsers.contract import PARSERS, ToolCall
from hone.agents.parsers.json_calls import HermesToolParser

PARSE = HermesToolParser().calls


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_the_table_knows_it() -> None:
    assert PARSERS.get("hermes") is HermesToolParser


def test_calls_are_read_in_order_and_the_text_around_them_is_not() -> None:
    text = (
        "think "
        + call('{"name": "add", "arguments": {"a": 1, "b": 2}}')
        + " and "
        + call('{"name": "stop", "arguments": {}}')
        + "<|im_end|>"
    )
    assert PARSE(text) == [ToolCall("add", {"a": 1, "b": 2}), ToolCall("stop", {})]


def test_arguments_written_as_a_json_string_are_read_too() -> None:
    assert PARSE(call('{"name": "f", "arguments": "{\\"x\\": 1}"}')) == [ToolCall("f", {"x": 1})]


def test_text_without_calls_has_none() -> None:
    assert PARSE("#### 42") == []


def test_a_call_that_is_never_closed_is_malformed() -> None:
    (call,) = PARSE("</tool_call> <tool_call> never closed")
    assert call.error == "the call is not closed with </tool_call>"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("add(1, 2)", "not valid JSON"),
        ("__import__('os').system('true')", "not valid JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "not valid JSON"),
        ("[1, 2]", "a call is a JSON object"),
        ('{"arguments": {}}', "a call is a JSON object"),
        ('{"name": 7, "arguments": {}}', "a call is a JSON object"),
        ('{"name": "f", "arguments": [1]}', "`arguments` is not a JSON object"),
        ('{"name": "f", "arguments": "no"}', "`arguments` is not a JSON object"),
        ("[" * 100_000, "longer than"),
        ("[" * 60_000, "not valid JSON"),
    ],
    ids=lambda text: text[:30],
)
def test_what_is_no_call_comes_back_with_an_error(body: str, why: str) -> None:
    (parsed,) = PARSE(call(body))
    assert parsed.error is not None
    assert why in parsed.error


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    for parsed in PARSE(f"<tool_call>{text}</tool_call>"):
        assert parsed.error or parsed.name is not None
