"""Reads the two answers that a scorer compares: a response's `<answer>…</answer>`, and a row's ground truth.

Answer tags are found in linear time. A ground truth is a scalar, dict or array, or JSON text of these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from hone.types import JsonObject, JsonValue

INVALID_PREDICTION = "[INVALID]"
"""The `pred` of a response without an answer."""
_OPEN, _CLOSE = "<answer>", "</answer>"
_PYTHON_SCALARS = frozenset((int, float, str, bool, type(None)))


def last_answer(text: str) -> str | None:
    """Returns the content of the last closed `<answer>…</answer>` (it may span lines), or None."""
    start = text.rfind(_OPEN, 0, max(0, text.rfind(_CLOSE)))
    if start < 0:
        return None
    # A closing tag that nothing opened may follow the answer.
    return text[start + len(_OPEN) : text.index(_CLOSE, start)].strip()


def all_answers(text: str, tag: str = "answer") -> list[str]:
    """Returns every answer from left to right, each from an opening tag to the next closing tag."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    answers = []
    start = text.find(opening)
    while start >= 0:
        end = text.find(closing, start)
        if end < 0:
            break
        answers.append(text[start + len(opening) : end].strip())
        start = text.find(opening, end)
    return answers


class GroundTruthError(ValueError):
    """A row's ground truth does not have the format that its scorer needs."""


def ground_truth_error(problem: str) -> GroundTruthError:
    return GroundTruthError(f"{problem}. Check reward_model.ground_truth of the data row.")


def decode_json(value: JsonValue) -> JsonValue:
    """Parses text that is a JSON object or array; returns any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def is_missing(value: JsonValue) -> bool:
    """Returns whether a value (its `target`, or every item) is null, NaN, blank, `null` or `[INVALID]`."""
    value = decode_json(to_python(value))
    if isinstance(value, Mapping):
        return not value or ("target" in value and is_missing(value["target"]))
    if isinstance(value, (list, tuple, set)):
        return all(is_missing(item) for item in value)
    if isinstance(value, str):
        return value.strip() in ("", "null", INVALID_PREDICTION)
    return value is None or value != value


def as_integer(value: JsonValue, name: str) -> int:
    """Converts `value` to an integer without rounding, or raises GroundTruthError."""
    if type(value) is int:
        return value
    value = to_python(value)
    try:
        number = int(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        number = None
    if number is None or (not isinstance(value, str) and number != value):
        raise ground_truth_error(f"{name} of ground_truth must be an integer; got {value!r:.80}")
    return number


def as_integers(value: JsonValue, name: str) -> list[int]:
    """Returns `value` as a list of integers, or raises GroundTruthError."""
    if not isinstance(value, list):
        raise ground_truth_error(
            f"{name} of ground_truth must be a list of integers; got {value!r:.80}"
        )
    return [item if type(item) is int else as_integer(item, name) for item in value]


def as_mapping(value: JsonValue, *keys: str) -> JsonObject:
    """Returns `value` as a mapping with `keys`, or raises GroundTruthError."""
    decoded = decode_json(to_python(value))
    if isinstance(decoded, dict) and all(key in decoded for key in keys):
        return decoded
    description = sorted(decoded) if isinstance(decoded, dict) else repr(value)[:80]
    raise ground_truth_error(
        f"ground_truth must be a mapping with {', '.join(keys)}; got {description}"
    )


def to_python(value: JsonValue) -> JsonValue:
    """Converts NumPy scalars and arrays to Python values, inside containers too."""
    if type(value) in _PYTHON_SCALARS:
        return value
    if isinstance(value, (dict, Mapping)):
        return {k: v if type(v) in _PYTHON_SCALARS else to_python(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [v if type(v) in _PYTHON_SCALARS else to_python(v) for v in value]
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else to_python(tolist())
