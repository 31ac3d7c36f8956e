"""Pads a batch, for example to a multiple of the number of ranks, and removes the padding.

The column `padded_row` marks the added rows, so that a worker can exclude them from a mean.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hone.protocol.rows import ProtocolError, take_batch

if TYPE_CHECKING:
    from hone.protocol.data_proto import DataProto

logger = logging.getLogger(__name__)

PADDED_ROW = "padded_row"
AUTO_PADDING_KEY = "_auto_padding"
AUTO_PADDING_ENV = "HONE_AUTO_PADDING"


class _AutoPadding(type):
    """Adds the class property `auto_padding`; the environment variable HONE_AUTO_PADDING=1 enables it too."""

    _enabled = False
    auto_padding_key = AUTO_PADDING_KEY

    @property
    def auto_padding(cls) -> bool:
        variable = os.environ.get(AUTO_PADDING_ENV, "").lower()
        return variable in {"1", "true", "yes", "on"} or cls._enabled

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise ProtocolError(f"auto_padding must be True or False, not {enabled!r}")
        cls._enabled = enabled


class DataProtoConfig(metaclass=_AutoPadding):
    """`auto_padding` allows uneven chunks in this process; a flag in a batch's meta_info has precedence."""


def padding_enabled(data: DataProto) -> bool:
    """Whether `chunk` may split the batch unevenly: the batch's flag, else DataProtoConfig.auto_padding."""
    return bool(data.meta_info.get(AUTO_PADDING_KEY, DataProtoConfig.auto_padding))


def append_copies(data: DataProto, padding_size: int, padding_candidate: str = "last") -> None:
    """Appends `padding_size` copies of the first or last row, in place."""
    if padding_candidate not in {"first", "last"}:
        raise ProtocolError(f"padding_candidate={padding_candidate!r}; use 'first' or 'last'")
    if padding_size < 0 or (padding_size and not len(data)):
        raise ProtocolError(f"cannot pad a batch of {len(data)} rows by {padding_size}")
    copied_row = 0 if padding_candidate == "first" else len(data) - 1
    index = [*range(len(data)), *[copied_row] * padding_size]
    padded = take_batch(data, torch.tensor(index, dtype=torch.long))
    data.batch, data.non_tensor_batch = padded.batch, padded.non_tensor_batch


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeats rows from the start, up to a multiple of `size_divisor` rows.

    Returns the batch and the number of added rows.
    """
    index = padded_index(len(data), size_divisor)
    pad_size = len(index) - len(data)
    return (data.select_idxs(index) if pad_size else data), pad_size


def padded_index(num_rows: int, size_divisor: int) -> torch.Tensor:
    """Returns the index of every row, and of repeated rows up to a multiple of `size_divisor` rows."""
    if size_divisor < 1:
        raise ProtocolError(
            f"a batch cannot be padded to a multiple of {size_divisor}; use 1 or more"
        )
    if num_rows == 0:
        logger.warning("an empty batch cannot be padded to a multiple of %d", size_divisor)
    return torch.arange(num_rows + -num_rows % size_divisor) % max(num_rows, 1)


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drops the last `pad_size` rows."""
    return data.slice(0, unpadded_size(len(data), pad_size)) if pad_size else data


def unpadded_size(num_rows: int, pad_size: int) -> int:
    """Returns how many of the rows remain without the last `pad_size`."""
    if pad_size < 0 or pad_size > num_rows:
        raise ProtocolError(f"cannot drop {pad_size} padded rows from a batch of {num_rows} rows")
    return num_rows - pad_size


def split_padded(data: DataProto, parts: int) -> list[DataProto]:
    """Splits a batch into `parts` batches of equal length; if rows are added, `padded_row` marks them.

    Each part has consecutive rows and at most one padded row.
    """
    if parts < 1:
        raise ProtocolError(f"a batch cannot be split into {parts} parts")
    num_rows = len(data)
    if num_rows % parts == 0:
        return data.chunk(parts) if num_rows else [data.select() for _ in range(parts)]
    row_number = torch.arange(math.ceil(num_rows / parts))  # within a part
    batches = []
    for rows in torch.arange(num_rows).tensor_split(parts):
        # A part without real rows repeats the first row of the batch.
        source = rows if len(rows) else torch.arange(1)
        batch = data.select_idxs(source[row_number % len(source)])
        batch.set_column(PADDED_ROW, row_number >= len(rows))
        batches.append(batch)
    return batches


def real_row_mask(data: DataProto) -> torch.Tensor:
    """Returns a bool mask [B] that is False for padded rows, which only fill the batch."""
    if not data.has_column(PADDED_ROW):
        return torch.ones(len(data), dtype=torch.bool)
    return ~torch.as_tensor(data.column(PADDED_ROW)).bool()


def zero_padded_rows(mask: torch.Tensor, data: DataProto) -> torch.Tensor:  # [B, T]
    """Returns a mask with 0 in the padded rows of the batch."""
    return mask * real_row_mask(data).to(mask.device)[:, None]


def without_padding(data: DataProto) -> DataProto:
    """Returns the batch without padded rows and without the `padded_row` column."""
    if not data.has_column(PADDED_ROW):
        return data
    batch = data.select_idxs(real_row_mask(data))
    batch.drop_column(PADDED_ROW)
    return batch


def drop_padded_rows(result: DataProto, inputs: Sequence[DataProto]) -> DataProto:
    """Removes the rows of a worker's result that belong to padded rows of its input batches."""
    padded_inputs = [batch for batch in inputs if batch.has_column(PADDED_ROW)]
    if result.has_column(PADDED_ROW):
        real_rows = without_padding(result)
    elif not padded_inputs or len(result) == 0:
        real_rows = result
    else:
        is_real = real_row_mask(padded_inputs[0])
        if len(result) == int(is_real.sum()):
            real_rows = result  # the worker has already dropped the padding
        elif len(result) % len(is_real) == 0 and all(
            real_row_mask(batch).tolist() == is_real.tolist() for batch in inputs if len(batch)
        ):
            repeat_count = len(result) // len(is_real)
            real_rows = result.select_idxs(is_real.repeat_interleave(repeat_count))
        else:
            raise ValueError(
                f"a worker got {len(is_real)} rows, {int((~is_real).sum())} of them padding, and returned "
                f"{len(result)}, so the padded rows are unknown; copy the column {PADDED_ROW!r} of one "
                "batch to the result, or drop padded rows first with hone.protocol.without_padding"
            )
    if padded_inputs and not any(real_row_mask(batch).any() for batch in padded_inputs):
        # The metrics are those of padding alone.
        real_rows = real_rows.select()
        real_rows.meta_info.pop("metrics", None)
    return real_rows
