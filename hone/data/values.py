"""Values of rows as plain Python: arrays and JSON text are decoded, and missing values are recognised."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hone.types import JsonValue

INVALID_PREDICTION = "[INVALID]"
"""The `pred` of a response without an answer."""
_PYTHON_SCALARS = frozenset((int, float, str, bool, type(None)))


def is_missing(value: JsonValue) -> bool:
    """Returns whether a value is None, NaN, blank, "null" or "[INVALID]".

    An empty dict is missing, and a dict whose `target` is missing; a list is missing if all items are.
    """
    value = decode_json(to_python(value))
    if isinstance(value, Mapping):
        return not value or ("target" in value and is_missing(value["target"]))
    if isinstance(value, (list, tuple, set)):
        return all(is_missing(item) for item in value)
    if isinstance(value, str):
        return value.strip() in ("", "null", INVALID_PREDICTION)
    return value is None or value != value  # NaN is not equal to itself


def decode_json(value: JsonValue) -> JsonValue:
    """Parses text that is a JSON object or array; returns any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def to_python(value: Any) -> Any:
    """Converts NumPy scalars and arrays to Python values, inside containers too."""
    if type(value) in _PYTHON_SCALARS:
        return value
    if isinstance(value, (dict, Mapping)):
        return {key: to_python(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_python(item) for item in value]
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else to_python(tolist())
