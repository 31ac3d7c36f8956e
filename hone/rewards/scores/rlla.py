"""RLLA (tool use): 0 or 1 for the format, plus -3 to 3 for the names, parameters and values of tool calls.

The reference is a response with the blocks think, tool_call and response. A tool_call block has one JSON
call per line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

from hone.text import BadText, read_json
from hone.types import JsonObject, JsonValue, Settings

Call: TypeAlias = tuple[str, JsonObject]  # the name of a tool, and its parameters
FORMAT_REWARD = 1.0
MAX_CALLS_REWARD = 3.0
_BLOCKS = ("tool_call", "response")
_END_TOKENS = re.compile(r"(?:\s|<\|im_end\|>|<\|eot_id\|>)+$")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Settings | None = None,
    step: int = 0,
) -> dict[str, float]:
    """Returns `{"score", "format_reward", "accuracy_reward"}`."""
    response = _END_TOKENS.sub("", solution_str).lstrip()
    format_reward = FORMAT_REWARD if _has_format(response, ground_truth) else 0.0
    calls_reward = _calls_reward(response, ground_truth)
    score = format_reward + calls_reward
    return {"score": score, "format_reward": format_reward, "accuracy_reward": calls_reward}


def _has_format(response: str, reference: str) -> bool:
    """Returns whether a response has a think block, then each block of the reference once."""
    names = [name for name in _BLOCKS if f"<{name}>" in reference]
    bodies = {"tool_call": r"\n.*?\n", "response": ".*?"}
    blocks = [rf"\n<{name}>{bodies[name]}</{name}>" for name in names]
    tags = [f"<{slash}{name}>" for name in names for slash in ("", "/")]
    pattern = rf"<think>.*?</think>{''.join(blocks)}"
    return all(response.count(tag) == 1 for tag in tags) and bool(
        re.fullmatch(pattern, response, re.DOTALL)
    )


def _calls_reward(response: str, reference: str) -> float:
    """Returns the similarity of the calls, scaled to -3…3; 0 if the reference has no calls."""
    if "<tool_call>" not in reference:
        return 0.0
    expected, calls = _parse_calls(reference), _parse_calls(response)
    if expected is None:
        raise ValueError(f"the tool calls of the ground truth cannot be read: {reference!r:.80}")
    if calls is None:
        return -MAX_CALLS_REWARD
    if calls == expected:
        return MAX_CALLS_REWARD
    similarity = _overlap([name for name, _ in expected], [name for name, _ in calls])
    max_similarity = 1.0
    unmatched = list(calls)
    for call in expected:
        max_similarity += 1.0 + len(call[1])
        similarities = [(_similarity(call, other), index) for index, other in enumerate(unmatched)]
        best_similarity, index = max(similarities, default=(0.0, 0), key=lambda pair: pair[0])
        if best_similarity > 0:
            similarity += best_similarity
            del unmatched[index]
    # More calls than expected are guesses.
    num_guesses = max(0, len(calls) - len(expected))
    guesses = sorted((1.0 + len(parameters) for _, parameters in unmatched), reverse=True)
    max_similarity += sum(guesses[:num_guesses])
    return 2 * MAX_CALLS_REWARD * similarity / max_similarity - MAX_CALLS_REWARD


def _parse_calls(text: str) -> list[Call] | None:
    """Returns the calls of the first tool_call block, or None if a call cannot be parsed."""
    _, opening, after = text.partition("<tool_call>")
    body, closing, _ = after.partition("</tool_call>")
    if not opening or not closing:
        return None
    calls: list[Call] = []
    for line in body.strip().split("\n"):
        try:
            call = read_json(line, strict=True)
            parameters = {key: _typed(value) for key, value in dict(call["parameters"]).items()}
            calls.append((str(call["name"]), parameters))
        except (BadText, TypeError, KeyError, ValueError):
            return None
    return calls


def _typed(value: JsonValue) -> JsonValue:
    """Returns a value in which true and false do not equal 1 and 0."""
    if isinstance(value, bool):
        return {"bool": str(value)}
    if isinstance(value, list):
        return list(map(_typed, value))
    return {k: _typed(v) for k, v in value.items()} if isinstance(value, dict) else value


def _similarity(call: Call, other: Call) -> float:
    """Returns the overlap of the parameter names plus the number of equal values; 0 for different tools."""
    (name, parameters), (other_name, other_parameters) = call, other
    if name != other_name:
        return 0.0
    num_equal = sum(
        key in other_parameters and other_parameters[key] == value
        for key, value in parameters.items()
    )
    return _overlap(list(parameters), list(other_parameters)) + num_equal


def _overlap(left: Sequence[str], right: Sequence[str]) -> float:
    """Returns the Jaccard index of two lists as multisets."""
    if not left or not right:
        return float(left == right)
    num_shared = (Counter(left) & Counter(right)).total()
    return num_shared / (len(left) + len(right) - num_shared)
