"""Ground truths as they arrive from parquet: scalars, dicts, arrays, or JSON text of these.

Reads only what a scorer asks for; it does not decide what a ground truth means.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

INVALID = "[INVALID]"
"""What a scorer's `pred` says where a response has no answer."""


class GroundTruthError(ValueError):
    """A row's ground truth does not have the form its scorer needs."""


def decode(value: Any) -> Any:
    """JSON text of an object or array becomes that object; anything else is returned as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def is_missing(value: Any) -> bool:
    """Whether a ground truth says nothing: null, NaN, blank text, `[INVALID]`, or empty all the way in.

    A scorer that compared a response with it would credit responses that say nothing either.
    """
    value = decode(plain(value))
    if isinstance(value, Mapping):
        return not value or ("target" in value and is_missing(value["target"]))
    if isinstance(value, (list, tuple, set)):
        return all(is_missing(item) for item in value)
    if isinstance(value, str):
        return value.strip() in ("", INVALID)
    return value is None or value != value


def integer(value: Any, name: str) -> int:
    """`value` as the integer it is, or GroundTruthError: nothing is rounded."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or (not isinstance(value, str) and number != value):
        raise GroundTruthError(
            f"{name} of ground_truth must be an integer; got {value!r:.80}. "
            "Check reward_model.ground_truth of the data row."
        )
    return number


def mapping(value: Any, *keys: str) -> Mapping[str, Any]:
    """`value` as a mapping that holds `keys`, or GroundTruthError that says what was got."""
    decoded = decode(value)
    if isinstance(decoded, Mapping) and all(key in decoded for key in keys):
        return decoded
    got = sorted(decoded) if isinstance(decoded, Mapping) else repr(value)[:80]
    raise GroundTruthError(
        f"ground_truth must be a mapping with {', '.join(keys)}; got {got}. "
        "Check reward_model.ground_truth of the data row."
    )


def plain(value: Any) -> Any:
    """NumPy scalars and arrays (and containers of them) as plain Python values."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value
