"""Trajectories of several rows: each output that an agent loop returns in a list is one row.

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


def repeat_rows_per_output(rows: DataProto, output_rows: Sequence[int]) -> DataProto:
    """Repeats each row of a group once per output; `output_rows[i]` is the row of output i."""
    if len(output_rows) == len(rows):
        return rows
    counts: Counter[int] = Counter()
    row_indices = []
    for row in output_rows:
        row_indices.append(counts[row])
        counts[row] += 1
    repeated = rows.select_idxs([row - output_rows[0] for row in output_rows])
    write(repeated, TRAJECTORY_ROW, object_array(row_indices))
    return repeated


def trajectory_indices(batch: DataProto) -> Tensor | None:
    """Returns [B]: the index of each row's trajectory; None if every row is a trajectory."""
    row_indices = batch.non_tensor_batch.get(TRAJECTORY_ROW)
    if row_indices is None:
        return None
    return torch.tensor([not row_index for row_index in row_indices]).cumsum(0) - 1


def last_row_indices(batch: DataProto) -> Tensor | None:
    """Returns [N]: the index of each trajectory's last row; None if every row is a trajectory."""
    numbers = trajectory_indices(batch)
    return None if numbers is None else numbers.bincount().cumsum(0) - 1


def is_last_row(batch: DataProto) -> np.ndarray:
    """Returns [B] bool: whether the row is the last of its trajectory."""
    last_indices = last_row_indices(batch)
    mask = np.full(len(batch), last_indices is None)
    if last_indices is not None:
        mask[last_indices.numpy()] = True
    return mask


def last_row_values(batch: DataProto, column: np.ndarray) -> np.ndarray:
    """Returns [N]: the values of a column [B] at the last row of each trajectory."""
    last_indices = last_row_indices(batch)
    return column if last_indices is None else column[last_indices.numpy()]


def trajectory_totals(batch: DataProto, per_row: Tensor) -> Tensor:
    """Returns [N]: the sums of `per_row` [B] over the rows of each trajectory."""
    numbers = trajectory_indices(batch)
    if numbers is None:
        return per_row
    return per_row.new_zeros(len(numbers.bincount())).index_add_(0, numbers, per_row)
