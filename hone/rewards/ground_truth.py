"""Converts the ground truth of a row to the type that its scorer needs."""

from __future__ import annotations

from hone.data.values import decode_json, to_python
from hone.types import JsonObject, JsonValue


class GroundTruthError(ValueError):
    """A row's ground truth does not have the format that its scorer needs."""


def ground_truth_error(problem: str) -> GroundTruthError:
    """Returns an error that names the config key of the ground truth."""
    return GroundTruthError(f"{problem}. Check reward_model.ground_truth of the data row.")


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


def as_answer(value: JsonValue) -> str:
    """Returns one answer as text; raises GroundTruthError for several answers.

    A list may have one item, and 72.0, to which a column with missing values turns 72, is 72.
    """
    value = to_python(value)
    if isinstance(value, list):
        if len(value) != 1:
            raise ground_truth_error(f"ground_truth must be one answer; got {value!r:.80}")
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def as_integers(value: JsonValue, name: str) -> list[int]:
    """Returns `value` as a list of integers, or raises GroundTruthError."""
    if not isinstance(value, list):
        raise ground_truth_error(
            f"{name} of ground_truth must be a list of integers; got {value!r:.80}"
        )
    return [as_integer(item, name) for item in value]


def as_mapping(value: JsonValue, *keys: str) -> JsonObject:
    """Returns `value` as a mapping with `keys`, or raises GroundTruthError."""
    decoded = decode_json(to_python(value))
    if isinstance(decoded, dict) and all(key in decoded for key in keys):
        return decoded
    description = f"keys {sorted(decoded)}" if isinstance(decoded, dict) else repr(value)[:80]
    raise ground_truth_error(
        f"ground_truth must be a mapping with {', '.join(keys)}; got {description}"
    )
