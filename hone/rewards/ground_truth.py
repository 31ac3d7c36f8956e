"""Converts ground truths of parquet files: scalars, dicts, arrays, or JSON text of these."""

from __future__ import annotations

import json
from collections.abc import Mapping

from hone.types import JsonObject, JsonValue

INVALID = "[INVALID]"
"""The `pred` of a response without an answer."""
_PLAIN = frozenset((int, float, str, bool, type(None)))


class GroundTruthError(ValueError):
    """A row's ground truth does not have the format that its scorer needs."""


def invalid(problem: str) -> GroundTruthError:
    return GroundTruthError(f"{problem}. Check reward_model.ground_truth of the data row.")


def decode(value: JsonValue) -> JsonValue:
    """Returns the value of JSON text of an object or array, and anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def is_missing(value: JsonValue) -> bool:
    """Whether a ground truth is null, NaN, blank, `null`, `[INVALID]`, or a list of only these."""
    value = decode(plain(value))
    if isinstance(value, Mapping):
        return not value or ("target" in value and is_missing(value["target"]))
    if isinstance(value, (list, tuple, set)):
        return all(is_missing(item) for item in value)
    if isinstance(value, str):
        return value.strip() in ("", "null", INVALID)
    return value is None or value != value


def integer(value: JsonValue, name: str) -> int:
    """Returns `value` as an integer, or raises GroundTruthError; nothing is rounded."""
    if type(value) is int:
        return value
    value = plain(value)
    try:
        number = int(value) if isinstance(value, (int, float, str)) else None
    except (ValueError, OverflowError):
        number = None
    if number is None or (not isinstance(value, str) and number != value):
        raise invalid(f"{name} of ground_truth must be an integer; got {value!r:.80}")
    return number


def integers(value: JsonValue, name: str) -> list[int]:
    """Returns `value` as a list of integers, or raises GroundTruthError."""
    if not isinstance(value, list):
        raise invalid(f"{name} of ground_truth must be a list of integers; got {value!r:.80}")
    return [item if type(item) is int else integer(item, name) for item in value]


def mapping(value: JsonValue, *keys: str) -> JsonObject:
    """Returns `value` as a mapping with `keys`, or raises GroundTruthError."""
    decoded = decode(plain(value))
    if isinstance(decoded, dict) and all(key in decoded for key in keys):
        return decoded
    description = sorted(decoded) if isinstance(decoded, dict) else repr(value)[:80]
    raise invalid(f"ground_truth must be a mapping with {', '.join(keys)}; got {description}")


def plain(value: JsonValue) -> JsonValue:
    """Converts NumPy scalars and arrays, also inside containers, to Python values."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (dict, Mapping)):
        return {k: v if type(v) in _PLAIN else plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [v if type(v) in _PLAIN else plain(v) for v in value]
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else plain(tolist())
