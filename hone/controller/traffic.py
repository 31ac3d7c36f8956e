"""Counts the payload bytes of worker calls without pickling the values a second time.

The payload is tensors, arrays, text and lists of numbers; single numbers are not counted. An object
that several rows share counts once per message, as in a pickle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

from hone.protocol import DataProto

T = TypeVar("T")

_NUMBER_BYTES = 8
_NUMBER_TYPES = (int, float, np.number, type(None))
_TEXT_TYPES = (str, bytes, bytearray)
_SEQUENCE_TYPES = (list, tuple)
_TYPES_SENT_BY_NAME = (type, ModuleType)


def payload_bytes(value: Any) -> int:
    """Returns the bytes of tensors, arrays, text and lists of numbers in a value."""
    total_bytes, seen_ids = 0, set()
    parts: list[Any] = [value]  # grows in the loop; keeps the parts alive, so that ids are unique
    for part in parts:
        if isinstance(part, _NUMBER_TYPES + _TYPES_SENT_BY_NAME) or id(part) in seen_ids:
            continue
        seen_ids.add(id(part))
        if isinstance(part, _TEXT_TYPES):
            total_bytes += len(part)
        elif isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, _SEQUENCE_TYPES):
            # A list of token ids or log-probs is long, so only three entries are checked.
            if part and all(isinstance(part[i], _NUMBER_TYPES) for i in (0, len(part) // 2, -1)):
                total_bytes += _NUMBER_BYTES * len(part)
            else:
                parts += part
        elif isinstance(part, torch.Tensor):
            total_bytes += part.values().nbytes if part.is_nested else part.nbytes
        elif isinstance(part, np.ndarray) and part.dtype != object:
            total_bytes += part.nbytes
        else:
            parts += _parts(part)
    return total_bytes


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, np.ndarray):
        return value.flat
    if isinstance(value, DataProto):
        tensors = () if value.batch is None else value.batch.values()
        return [*tensors, *value.non_tensor_batch.values(), value.meta_info]
    return (value if isinstance(value, Mapping) else getattr(value, "__dict__", {})).values()


def count_and_collect(
    traffic: Counter[str], key: str, collect: Callable[[list[Any]], T], results: list[Any]
) -> T:
    """Adds the payload bytes of the results to `traffic[key]` and returns `collect(results)`."""
    traffic[key] += sum(map(payload_bytes, results))
    return collect(results)


def traffic_metrics(counters: Iterable[Counter[str]]) -> dict[str, float]:
    """Returns the bytes per method since the last call and their sum; clears the counters."""
    total: Counter[str] = Counter({"weights": 0})
    for counter in {id(counter): counter for counter in counters}.values():
        total.update(counter)
        counter.clear()
    metrics = {
        f"traffic/{key}_bytes": float(count)
        for key, count in total.items()
        if count or key == "weights"
    }
    return metrics | {"traffic/step_bytes": float(total.total())}
