"""Making a batch divisible by the number of ranks, and undoing it.

Rows added to split a batch are marked in the column `padded_row`, so that a worker can leave them
out of a mean. Leaves out token padding: that is rollout's business.
"""

from __future__ import annotations

import logging
import os
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
    """The class attribute `auto_padding`, which also listens to the environment."""

    _enabled = False
    auto_padding_key = AUTO_PADDING_KEY

    @property
    def auto_padding(cls) -> bool:
        by_environment = os.environ.get(AUTO_PADDING_ENV, "").lower() in {"1", "true", "yes", "on"}
        return by_environment or cls._enabled

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise ProtocolError(f"auto_padding is True or False, not {enabled!r}")
        cls._enabled = enabled


class DataProtoConfig(metaclass=_AutoPadding):
    """Whether batches without a flag of their own may be cut unevenly, in this process."""


def may_be_cut_unevenly(data: DataProto) -> bool:
    """What the batch's own flag says, else what holds for the process."""
    return bool(data.meta_info.get(AUTO_PADDING_KEY, DataProtoConfig.auto_padding))


def append_copies(data: DataProto, padding_size: int, padding_candidate: str = "last") -> None:
    """Append `padding_size` copies of the first or last row, in place."""
    if padding_candidate not in {"first", "last"}:
        raise ProtocolError(f"padding_candidate={padding_candidate!r}; use 'first' or 'last'")
    rows = len(data)
    if padding_size < 0 or (padding_size and not rows):
        raise ProtocolError(f"cannot pad a batch of {rows} rows by {padding_size}")
    copied = 0 if padding_candidate == "first" else rows - 1
    index = [*range(rows), *[copied] * padding_size]
    padded = take_batch(data, torch.tensor(index, dtype=torch.long))
    data.batch, data.non_tensor_batch = padded.batch, padded.non_tensor_batch


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Repeat rows from the start up to a multiple; return the batch and the rows added."""
    if size_divisor < 1:
        raise ProtocolError(
            f"a batch cannot be padded to a multiple of {size_divisor}; use 1 or more"
        )
    rows = len(data)
    if rows == 0:
        logger.warning("an empty batch was asked to be padded to a multiple of %d", size_divisor)
        return data, 0
    pad = -rows % size_divisor
    if pad == 0:
        return data, 0
    return data.select_idxs(torch.arange(rows + pad) % rows), pad


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drop the last `pad_size` rows."""
    if pad_size < 0 or pad_size > len(data):
        raise ProtocolError(f"cannot drop {pad_size} padded rows from a batch of {len(data)} rows")
    return data if pad_size == 0 else data.slice(0, len(data) - pad_size)


def split_padded(data: DataProto, parts: int) -> list[DataProto]:
    """Cut into `parts` batches of equal length, adding marked rows where there are too few.

    Real rows are spread evenly and in order: no part holds more padding than it must.
    """
    if parts < 1:
        raise ProtocolError(f"a batch cannot be cut into {parts} parts")
    rows = len(data)
    if rows % parts == 0:
        return data.chunk(parts) if rows else [data.select() for _ in range(parts)]
    length = -(-rows // parts)
    pieces = []
    start = 0
    for part in range(parts):
        real = rows // parts + (part < rows % parts)
        # A part without any real row borrows the batch's first ones.
        source = torch.arange(start, start + real) if real else torch.arange(1)
        index = source[torch.arange(length) % len(source)]
        piece = data.select_idxs(index)
        piece.set_column(PADDED_ROW, torch.arange(length) >= real)
        pieces.append(piece)
        start += real
    return pieces


def real_rows(data: DataProto) -> torch.Tensor:
    """Which rows are real: bool [B], False where the controller added a row."""
    if not data.has_column(PADDED_ROW):
        return torch.ones(len(data), dtype=torch.bool)
    return ~torch.as_tensor(data.column(PADDED_ROW)).bool()


def without_padding(data: DataProto) -> DataProto:
    """The batch without rows the controller added, and without the mark."""
    if not data.has_column(PADDED_ROW):
        return data
    real = data.select_idxs(real_rows(data))
    real.drop_column(PADDED_ROW)
    return real
