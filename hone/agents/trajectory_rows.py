"""Trajectories of several rows: an agent loop may return a list of outputs, one batch row each.

The column `trajectory_row` is the row's index in its trajectory (None is 0); a batch without such
trajectories does not have it. The rows of a trajectory are adjacent until dispatch to ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hone.columns import write
from hone.protocol import DataProto
from hone.protocol.rows import object_array

TRAJECTORY_ROW = "trajectory_row"


def row_per_output(rows: DataProto, row_of: Sequence[int]) -> DataProto:
    """Repeats the submitted rows of a group per output; `row_of[i]` is the row of output i."""
    if len(row_of) == len(rows):
        return rows
    counts: Counter[int] = Counter()
    positions = []
    for row in row_of:
        positions.append(counts[row])
        counts[row] += 1
    repeated = rows.select_idxs([row - row_of[0] for row in row_of])
    write(repeated, TRAJECTORY_ROW, object_array(positions))
    return repeated


def trajectory_numbers(batch: DataProto) -> Tensor | None:
    """Returns [B]: the number of each row's trajectory; None if every row is a trajectory."""
    positions = batch.non_tensor_batch.get(TRAJECTORY_ROW)
    if positions is None:
        return None
    return torch.tensor([not position for position in positions]).cumsum(0) - 1


def last_rows(batch: DataProto) -> Tensor | None:
    """Returns [N]: the last row of each trajectory; None if every row is a trajectory."""
    numbers = trajectory_numbers(batch)
    return None if numbers is None else numbers.bincount().cumsum(0) - 1


def is_last_row(batch: DataProto) -> np.ndarray:
    """Returns [B] bool: whether the row is the last of its trajectory."""
    last = last_rows(batch)
    mask = np.full(len(batch), last is None)
    if last is not None:
        mask[last.numpy()] = True
    return mask


def of_trajectories(batch: DataProto, column: np.ndarray) -> np.ndarray:
    """[B] → [N]: Returns the values of the trajectories' last rows."""
    last = last_rows(batch)
    return column if last is None else column[last.numpy()]


def totals(batch: DataProto, per_row: Tensor) -> Tensor:
    """[B] → [N]: Returns the sums over the rows of each trajectory."""
    numbers = trajectory_numbers(batch)
    if numbers is None:
        return per_row
    return per_row.new_zeros(len(numbers.bincount())).index_add_(0, numbers, per_row)
