"""Converts the return value of a tool to the text that the model reads, a reward and metrics.

A tool may return text, a ToolResponse, JSON data, or one of these in a tuple with a reward and metrics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TypeAlias

from hone.agents.tools.contract import ToolResponse
from hone.text import clean_text, clean_values
from hone.types import JsonValue, Row, Settings

Shown: TypeAlias = "JsonValue | ToolResponse"
"""Values that can be shown to the model; anything else is converted with `str`."""
Rewarded: TypeAlias = "tuple[Shown, float | None] | tuple[Shown, float | None, Settings | None]"
ToolResult: TypeAlias = "Shown | tuple[Shown] | Rewarded"
Answer: TypeAlias = tuple[ToolResponse, float, Row]


def response_of(value: ToolResult) -> ToolResponse:
    """Converts a result to a ToolResponse: text unchanged, dicts, lists and tuples as JSON, else `str`."""
    if isinstance(value, ToolResponse):
        return value
    if isinstance(value, str):
        return ToolResponse(text=value)
    if isinstance(value, Mapping | list | tuple):
        return ToolResponse(text=json.dumps(clean_values(value), ensure_ascii=False))
    return ToolResponse(text="" if value is None else str(value))


def normalize_function_tool_return(result: ToolResult) -> Answer:
    """Converts the result of a function tool; a tuple may be (answer, reward[, metrics]).

    A pair of numbers or strings is data, not a reward. Tuples with 0 or more than 3 items are refused.
    """
    if isinstance(result, tuple) and not 1 <= len(result) <= 3:
        raise TypeError(
            "a function tool returns (answer,), (answer, reward) or (answer, reward, metrics): a "
            f"tuple of length 1, 2, or 3, got {len(result)}; return a list to show data"
        )
    return tool_answer(result) if _has_reward(result) else (response_of(result), 0.0, {})


def _has_reward(result: ToolResult) -> bool:
    if not isinstance(result, tuple):
        return False
    if len(result) == 1:
        return True
    return (
        isinstance(result[0], str | ToolResponse | Mapping | list | None)
        and (result[1] is None or _is_number(result[1]))
        and (len(result) == 2 or isinstance(result[2], Mapping | None))
    )


def _is_number(value: Shown) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "item") and hasattr(value, "dtype"))


def tool_answer(result: ToolResult) -> Answer:
    """Converts the result of `BaseTool.execute`: (answer, reward, metrics), or the first one or two."""
    parts = result if isinstance(result, tuple) else (result,)
    given = parts[1] if len(parts) > 1 else None
    facts = parts[2] if len(parts) > 2 else None
    reward = 0.0 if given is None else float(given)
    if not math.isfinite(reward):
        raise ValueError(f"the reward of a call is {reward}; give a finite number")
    return response_of(parts[0]), reward, dict(facts or {})


def text_of(response: ToolResponse) -> str:
    """Returns the text that the model reads."""
    text = response.text
    return clean_text(text if isinstance(text, str) else "" if text is None else str(text))
