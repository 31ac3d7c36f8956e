"""DataProto, the batch that the training loop and the workers exchange, and its operations.

The columns are declared in hone.columns.
"""

from __future__ import annotations

from hone.protocol.data_proto import DataProto, DataProtoItem, collate_fn
from hone.protocol.future import DataProtoFuture, all_gather_data_proto
from hone.protocol.padding import (
    AUTO_PADDING_KEY,
    PADDED_ROW,
    DataProtoConfig,
    pad_dataproto_to_divisor,
    real_row_mask,
    split_padded,
    unpad_dataproto,
    without_padding,
)
from hone.protocol.reshaping import fold_batch_dim, unfold_batch_dim
from hone.protocol.rows import (
    ProtocolError,
    deeply_equal,
    object_array,
    union_numpy_dict,
    union_tensor_dict,
)
from hone.protocol.tensordicts import BatchData
from hone.protocol.wire import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)

__all__ = [
    "AUTO_PADDING_KEY",
    "PADDED_ROW",
    "BatchData",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "ProtocolError",
    "all_gather_data_proto",
    "collate_fn",
    "deeply_equal",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "object_array",
    "pad_dataproto_to_divisor",
    "real_row_mask",
    "serialize_single_tensor",
    "serialize_tensordict",
    "split_padded",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
    "without_padding",
]
