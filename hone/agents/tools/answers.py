"""Converts the return value of a tool to the text that the model reads, a reward and metrics.

A tool returns text, a ToolResponse or JSON data, alone or as (answer[, reward[, metrics]]).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TypeAlias

from hone.agents.tools.contract import ToolResponse
from hone.text import clean_text, clean_values
from hone.types import Fields, JsonValue, Settings

ToolOutput: TypeAlias = "JsonValue | ToolResponse"
"""What the model reads; values of other types are converted with `str`."""
ToolResult: TypeAlias = (
    "ToolOutput | tuple[ToolOutput] | tuple[ToolOutput, float | None] "
    "| tuple[ToolOutput, float | None, Settings | None]"
)
"""What a tool returns: answer[, reward[, metrics]]."""
CallResult: TypeAlias = tuple[ToolResponse, float, Fields]
"""The answer, reward and metrics of a call."""


def to_tool_response(value: ToolResult) -> ToolResponse:
    """Converts an answer to a ToolResponse: dicts, lists and tuples become JSON."""
    if isinstance(value, ToolResponse):
        return value
    if isinstance(value, str):
        return ToolResponse(text=value)
    if isinstance(value, Mapping | list | tuple):
        return ToolResponse(text=json.dumps(clean_values(value), ensure_ascii=False))
    return ToolResponse(text="" if value is None else str(value))


def normalize_function_tool_return(result: ToolResult) -> CallResult:
    """Converts the result of a function tool; a tuple may be (answer, reward[, metrics]).

    A pair of two numbers or of two strings is data without a reward.
    """
    if isinstance(result, tuple) and not 1 <= len(result) <= 3:
        raise TypeError(
            "a function tool returns (answer,), (answer, reward) or (answer, reward, metrics): a "
            f"tuple of length 1, 2, or 3, got {len(result)}; return a list to show data"
        )
    if _is_answer_tuple(result):
        return normalize_tool_return(result)
    return to_tool_response(result), 0.0, {}


def _is_answer_tuple(result: ToolResult) -> bool:
    """Returns whether the result is (answer[, reward[, metrics]]), not a tuple of data."""
    if not isinstance(result, tuple):
        return False
    if len(result) == 1:
        return True
    return (
        isinstance(result[0], str | ToolResponse | Mapping | list | None)
        and (result[1] is None or _is_number(result[1]))
        and (len(result) == 2 or isinstance(result[2], Mapping | None))
    )


def _is_number(value: ToolOutput) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "item") and hasattr(value, "dtype"))


def normalize_tool_return(result: ToolResult) -> CallResult:
    """Converts the result of `BaseTool.execute`: (answer[, reward[, metrics]])."""
    parts = result if isinstance(result, tuple) else (result,)
    metrics = parts[2] if len(parts) > 2 else None
    reward = float(parts[1]) if len(parts) > 1 and parts[1] is not None else 0.0
    if not math.isfinite(reward):
        raise ValueError(f"the reward of a call is {reward}; give a finite number")
    return to_tool_response(parts[0]), reward, dict(metrics or {})


def response_text(response: ToolResponse) -> str:
    """Returns the text that the model reads."""
    text = response.text
    return clean_text(text if isinstance(text, str) else "" if text is None else str(text))
