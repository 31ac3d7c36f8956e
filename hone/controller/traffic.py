"""Counts the payload of dispatched calls in bytes, without pickling it a second time.

The payload is tensors, arrays, text and lists of numbers; single numbers and the envelope are not counted.
An object that several rows share counts once per message, as in a pickle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from hone.protocol import DataProto

T = TypeVar("T")

_NUMBER_BYTES = 8
_PLAIN = (int, float, np.number, type(None))


def payload_bytes(value: Any, seen: dict[int, Any] | None = None) -> int:
    """Returns the bytes of tensors, arrays, text and lists of numbers in a value."""
    if isinstance(value, _PLAIN):
        return 0
    seen = {} if seen is None else seen
    if id(value) in seen:
        return 0
    seen[id(value)] = value  # kept alive, so that no other object gets its id
    if isinstance(value, torch.Tensor):
        return value.values().nbytes if value.is_nested else value.nbytes
    if isinstance(value, np.ndarray):
        return _sum(value.flat, seen) if value.dtype == object else value.nbytes
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, DataProto):
        tensors = () if value.batch is None else value.batch.values()
        return _sum([*tensors, *value.non_tensor_batch.values(), value.meta_info], seen)
    if isinstance(value, Mapping):
        return _sum(value.values(), seen)
    if isinstance(value, list | tuple):
        # Token ids and log-probs are told by three entries, because lists of them are long.
        samples = [value[i] for i in (0, len(value) // 2, -1)] if value else [""]
        if all(isinstance(sample, _PLAIN) for sample in samples):
            return _NUMBER_BYTES * len(value)
        return _sum(value, seen)
    return _sum(getattr(value, "__dict__", {}).values(), seen)


def _sum(values: Iterable[Any], seen: dict[int, Any]) -> int:
    return sum(payload_bytes(value, seen) for value in values)


def counted(
    traffic: Counter[str], key: str, collect: Callable[[list[Any]], T], results: list[Any]
) -> T:
    """Adds the payload of the ranks' results to `traffic`, then joins them."""
    traffic[key] += sum(map(payload_bytes, results))
    return collect(results)


def traffic_metrics(counters: Iterable[Counter[str]]) -> dict[str, float]:
    """Returns what the groups have counted since the last call, and their sum; clears the counters."""
    total: Counter[str] = Counter({"weights": 0})
    for counter in {id(counter): counter for counter in counters}.values():
        total.update(counter)
        counter.clear()
    carried = {key: count for key, count in total.items() if count or key == "weights"}
    metrics = {f"traffic/{key}_bytes": float(count) for key, count in carried.items()}
    return metrics | {"traffic/step_bytes": float(total.total())}
