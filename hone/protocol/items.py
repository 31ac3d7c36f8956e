"""From single rows back to a batch: the collate function of a data loader over a DataProto."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hone.protocol.data_proto import DataProto, DataProtoItem
from hone.protocol.errors import ProtocolError
from hone.protocol.rows import column_array


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """The batch whose rows are these items; all must have the same columns."""
    if not x:
        raise ProtocolError("nothing to collate: the list of rows is empty")
    names = x[0].non_tensor_batch.keys()
    for number, item in enumerate(x):
        if item.non_tensor_batch.keys() != names or (item.batch is None) != (x[0].batch is None):
            raise ProtocolError(f"row {number} does not have the columns of row 0")
    arrays = {name: column_array([item.non_tensor_batch[name] for item in x]) for name in names}
    tensors = [item.batch for item in x if item.batch is not None]
    batch = torch.stack(tensors).contiguous() if tensors else None
    return DataProto(batch, arrays)
