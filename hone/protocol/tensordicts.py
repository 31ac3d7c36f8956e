"""Splits and joins batches that are TensorDicts instead of DataProtos.

A column is a tensor, a jagged tensor or a `NonTensorStack` with one entry per row; metadata of the
whole batch is `NonTensorData`. `DataProto.from_tensordict` and `to_tensordict` convert between the
two types.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from tensordict import NonTensorData, TensorDict
from torch import Tensor

from hone.protocol.rows import ProtocolError, cat_columns, row_indices, take_rows
from hone.types import Fields

Index: TypeAlias = "Tensor | np.ndarray | Sequence[int]"


@runtime_checkable
class Chunkable(Protocol):
    """A DataProto or a DataProtoFuture."""

    def chunk(self, chunks: int) -> Sequence[Chunkable]: ...

    @staticmethod
    def concat(data: Sequence[Chunkable]) -> Chunkable: ...


def concat_tensordict(data: Sequence[TensorDict]) -> TensorDict:
    """Concatenates batches along the rows; the result has the metadata of the first."""
    if not data:
        raise ProtocolError("nothing to concatenate: the list of batches is empty")
    if not data[0].batch_size:
        return concat_tensordict_with_none_bsz(data)
    columns, metadata = zip(*map(_split_metadata, data), strict=True)
    num_rows = sum(len(batch) for batch in data)
    return TensorDict(cat_columns(list(columns), "columns") | metadata[0], batch_size=[num_rows])


def _split_metadata(batch: TensorDict) -> tuple[Fields, dict[str, NonTensorData]]:
    """Returns the columns and the metadata of a batch."""
    columns: Fields = {}
    metadata: dict[str, NonTensorData] = {}
    for key in batch.keys():  # noqa: SIM118
        value = batch.get(key)
        if isinstance(value, NonTensorData):
            metadata[key] = NonTensorData(value.data)
        else:
            columns[key] = value
    return columns, metadata


def concat_tensordict_with_none_bsz(data: Sequence[TensorDict]) -> TensorDict:
    """Returns the first batch; all must have only metadata."""
    if any(batch.batch_size for batch in data):
        raise ProtocolError("cannot concatenate batches of which only some have rows")
    return data[0]


def select_rows(batch: TensorDict, indices: Index | slice) -> TensorDict:
    """Returns a batch with the rows at `indices` of every column, and with the same metadata."""
    index = indices if isinstance(indices, slice) else row_indices(indices, len(batch))
    columns, metadata = _split_metadata(batch)
    columns = {key: take_rows(value, index) for key, value in columns.items()}
    num_rows = len(take_rows(np.arange(len(batch)), index))
    return TensorDict(columns | metadata, batch_size=[num_rows])


def chunk_tensordict(td: TensorDict, chunks: int) -> list[TensorDict]:
    """Splits a batch into equal parts, in order."""
    num_rows = len(td)
    if chunks < 1 or num_rows % chunks:
        raise ProtocolError(f"{num_rows} rows do not divide into {chunks} equal parts")
    size = num_rows // chunks
    return [select_rows(td, slice(i * size, (i + 1) * size)) for i in range(chunks)]


class BatchData:
    """Splits and concatenates a DataProto, a DataProtoFuture or a TensorDict (named as in verl)."""

    def __init__(self, data: Chunkable | TensorDict | Sequence[Chunkable | TensorDict]) -> None:
        self._data: Any = data

    def is_chunkable(self) -> bool:
        return isinstance(self._data, TensorDict | Chunkable)

    def is_concatable(self) -> bool:
        data = self._data
        return isinstance(data, list | tuple) and bool(data) and BatchData(data[0]).is_chunkable()

    def chunk(self, chunks: int) -> Sequence[Chunkable | TensorDict]:
        """Splits one batch into equal parts."""
        if not self.is_chunkable():
            raise ProtocolError(f"a {type(self._data).__name__} cannot be split into chunks")
        if isinstance(self._data, TensorDict):
            return chunk_tensordict(self._data, chunks)
        return self._data.chunk(chunks)

    def concat(self) -> Chunkable | TensorDict:
        """Concatenates a list of batches."""
        if not self.is_concatable():
            raise ProtocolError("concat needs a list of at least one DataProto or TensorDict")
        if isinstance(self._data[0], TensorDict):
            return concat_tensordict(self._data)
        return type(self._data[0]).concat(self._data)
