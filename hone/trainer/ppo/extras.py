"""The extras of a score function: values that the function returns next to the score. Each is a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from hone.agents.collate import is_last_row
from hone.protocol import DataProto
from hone.rewards.failures import RewardError
from hone.types import JsonValue

Extras: TypeAlias = Mapping[str, Sequence[JsonValue]]
"""The extras by name, with one value per row."""
FAILURE_COLUMN = "reward_failure"
"""The extra with the reason why a row could not be scored; None for a scored row."""


def has_extra(batch: DataProto, name: str) -> bool:
    """Returns whether the scorer returns the extra `name`; True if the scorer failed on every row."""
    failures = batch.non_tensor_batch.get(FAILURE_COLUMN, np.empty(0, dtype=object))
    last_failures = failures[is_last_row(batch)] if len(failures) else failures
    all_failed = len(last_failures) > 0 and all(failure is not None for failure in last_failures)
    return name in batch.meta_info.get("reward_extra_names", ()) or all_failed


def extra_numbers(batch: DataProto, name: str, failure_score: float) -> list[float]:
    """Returns the scorer's extra `name` per row: `failure_score` for a failed row, and 0 for a row that is
    not the last of its trajectory."""
    arrays, missing = batch.non_tensor_batch, [None] * len(batch)
    is_last = is_last_row(batch)
    numbers = []
    for row, (value, failure) in enumerate(
        zip(arrays.get(name, missing), arrays.get(FAILURE_COLUMN, missing), strict=True)
    ):
        if value is None and (failure is not None or not is_last[row]):
            value = failure_score if is_last[row] else 0.0
        try:
            numbers.append(float(value))
        except (TypeError, ValueError, OverflowError) as error:
            source = arrays.get("data_source", missing)[row]
            raise RewardError(
                f"row {row} (data_source {source!r}) has no number under {name!r}, got {value!r}; "
                "the score function must return one for every row that it scores"
            ) from error
    return numbers
