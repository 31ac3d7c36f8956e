"""DataProto and its verbs: the one currency between the loop and the workers.

Each file holds one concern; what others use is named here. Leaves out what the columns mean
(hone.columns) and any transport.
"""

from __future__ import annotations

from hone.protocol.data_proto import DataProto, DataProtoItem
from hone.protocol.future import DataProtoFuture
from hone.protocol.gather import all_gather_data_proto
from hone.protocol.padding import (
    AUTO_PADDING_KEY,
    PADDED_ROW,
    pad_dataproto_to_divisor,
    real_rows,
    split_padded,
    unpad_dataproto,
    without_padding,
)
from hone.protocol.union import same, union_numpy_dict, union_tensor_dict

__all__ = [
    "AUTO_PADDING_KEY",
    "PADDED_ROW",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "pad_dataproto_to_divisor",
    "real_rows",
    "same",
    "split_padded",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
    "without_padding",
]
