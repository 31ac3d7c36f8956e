"""No parser raises on hostile text, and the time is linear in the text length."""

from __future__ import annotations

import gc
import os
import random
import time

import pytest

from hone.agents.parsers.contract import PARSERS, ToolParser
from hone.agents.tools.contract import function_schema

TOOLS = [function_schema("add", "Add.", a={"type": "integer"}, b={"type": "string"})]
MARKS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=add>",
        "</function>",
        "<parameter=a>",
        "</parameter>",
    ),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<tool>",
        "</tool>",
        "<args>",
        "</args>",
    ),
    *(
        "<|python_tag|>",
        "<|python_start|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|call|>",
        "<|end|>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *(
        "<|tool_call_end|>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "```json",
        "```",
    ),
    *("<|channel|>commentary to=functions.add", "<|message|>", "Action:", "Action Input:"),
    *(
        "\nObservation:",
        "Final Answer:",
        "[add(",
        "a=",
        "b=",
        ")]",
        "functions.add:0",
        " to=functions.",
    ),
)
PIECES = (
    *MARKS,
    *"{}[]()\":,;=\\'\n \0",
    *(
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "add", "parameters": "{"}',
        '"a": ',
        "add",
    ),
    *(
        "1",
        "-",
        "NaN",
        "1e999",
        "9" * 5000,
        "[" * 3000,
        '{"a":' * 500,
        "\ud800",
        "\x1b[2J",
        "é" * 50,
    ),
    *("true", "None", "\\u00", '"' * 99, "'" * 99, "(" * 500, "-" * 500, "lambda:", "add(" * 50),
)
SECONDS = 0.010


def hostile(seed: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choices(PIECES, k=draw.randint(1, 24)))


def cpu_seconds(parser: ToolParser, text: str) -> float:
    gc.disable()  # its cost follows from everything that the process holds
    try:
        started = time.thread_time()
        parser.calls_with_schemas(TOOLS, text)
        parser.content(text)
        return time.thread_time() - started
    finally:
        gc.enable()


def slow_texts(name: str, count: int) -> list[tuple[float, int]]:
    """Returns the seeds of texts that exceeded the time limit three times in a row."""
    parser = PARSERS.get(name)()
    slow = []
    for seed in range(count):
        text = hostile(seed)
        if cpu_seconds(parser, text) > SECONDS:
            best = min(cpu_seconds(parser, text) for _ in range(3))
            if best > SECONDS:
                slow.append((best, seed))
    return slow


@pytest.mark.parametrize("name", PARSERS.names())
def test_no_hostile_text_breaks_or_holds_up_a_parser(name: str) -> None:
    assert slow_texts(name, 150) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS.names())
def test_many_hostile_texts(name: str) -> None:
    """HONE_FUZZ=100000 tests this many texts per parser."""
    assert slow_texts(name, int(os.environ.get("HONE_FUZZ", "1000"))) == []


@pytest.mark.parametrize("size", [1 << 16, pytest.param(1 << 20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PARSERS.names())
def test_time_is_linear_in_the_text(name: str, size: int) -> None:
    """A text of eight times the length takes at most 24 times as long, up to a megabyte."""
    parser = PARSERS.get(name)()
    for piece in (
        *MARKS,
        " ",
        "\n",
        '{"a":',
        "[",
        '"',
        "\\",
        "[add(a=",
        "<tool_call>{",
        "[TOOL_CALLS]{}",
        "Action: x[",
    ):
        short, long = (piece * (length // len(piece)) for length in (size >> 3, size))
        least = max(min(cpu_seconds(parser, short) for _ in range(2)), 0.001)
        assert min(cpu_seconds(parser, long) for _ in range(2)) < 24 * least, piece
