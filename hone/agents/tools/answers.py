"""What a tool returned, as the model reads it: text, with its reward and its metrics.

A tool may return text, a ToolResponse, JSON data, or one of these in a tuple with a reward and metrics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hone.agents.tools.contract import ToolResponse
from hone.text import clean_text, clean_values

Answer = tuple[ToolResponse, float, dict[str, Any]]


def response_of(value: Any) -> ToolResponse:
    """A ToolResponse as it is; text as its text; dicts, lists and tuples as JSON; else `str`."""
    if isinstance(value, ToolResponse):
        return value
    if isinstance(value, str):
        return ToolResponse(text=value)
    if isinstance(value, Mapping | list | tuple):
        return ToolResponse(text=json.dumps(clean_values(value), ensure_ascii=False))
    return ToolResponse(text="" if value is None else str(value))


def function_answer(result: Any) -> Answer:
    """What a function tool returned; a tuple is (answer, reward[, metrics]) where it looks like one."""
    return tool_answer(result if _has_reward(result) else (result,))


def _has_reward(result: Any) -> bool:
    return (
        isinstance(result, tuple)
        and len(result) in (2, 3)
        and isinstance(result[0], str | ToolResponse | Mapping | list | None)
        and (result[1] is None or _is_number(result[1]))
        and (len(result) == 2 or isinstance(result[2], Mapping | None))
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (hasattr(value, "item") and hasattr(value, "dtype"))


def tool_answer(result: Any) -> Answer:
    """What `BaseTool.execute` returned: (answer, reward, metrics), or the first one or two of them."""
    parts = result if isinstance(result, tuple) else (result,)
    reward = float(parts[1]) if len(parts) > 1 and parts[1] is not None else 0.0
    if not math.isfinite(reward):
        raise ValueError(f"the reward of a call is {reward}; give a finite number")
    metrics = dict(parts[2]) if len(parts) > 2 and parts[2] else {}
    return response_of(parts[0] if parts else None), reward, metrics


def text_of(response: ToolResponse) -> str:
    """The text that the model reads."""
    text = response.text
    return clean_text(text if isinstance(text, str) else "" if text is None else str(text))
