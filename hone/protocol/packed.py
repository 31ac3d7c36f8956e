"""Tensors as plain tuples and bytes, in verl's form: `serialize_tensordict` and its inverse.

For code that ships tensors by its own means. A DataProto itself crosses processes by wire.py.
"""

from __future__ import annotations

import numpy as np
import torch
from tensordict import TensorDict

PackedTensor = tuple[str, tuple[int, ...], np.ndarray]
"""dtype name, shape, and the bytes as a numpy array."""
PackedColumn = PackedTensor | tuple[str, list[PackedTensor]]
PackedTensorDict = tuple[tuple[int, ...], str | None, dict[str, PackedColumn]]
"""Batch size, device name, and each column: a PackedTensor, or (layout, its rows) where nested."""


def serialize_single_tensor(obj: torch.Tensor) -> PackedTensor:
    """(dtype name, shape, bytes) of one dense tensor."""
    flat = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), flat.numpy()


def deserialize_single_tensor(arr: PackedTensor) -> torch.Tensor:
    """The tensor that `serialize_single_tensor` was given; it owns its memory."""
    name, shape, data = arr
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    buffer = bytearray(data)
    if not buffer:  # torch.frombuffer refuses an empty buffer
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).reshape(shape)


def serialize_tensordict(batch: TensorDict) -> PackedTensorDict:
    """Batch size, device and columns as plain containers and bytes."""
    columns: dict[str, PackedColumn] = {}
    for key, value in batch.items():
        if value.is_nested:
            layout = str(value.layout).removeprefix("torch.")
            columns[key] = (layout, [serialize_single_tensor(row) for row in value.unbind()])
        else:
            columns[key] = serialize_single_tensor(value)
    device = None if batch.device is None else str(batch.device)
    return tuple(batch.batch_size), device, columns


def deserialize_tensordict(arr: PackedTensorDict) -> TensorDict:
    """The TensorDict that `serialize_tensordict` was given."""
    batch_size, device, columns = arr
    tensors: dict[str, torch.Tensor] = {}
    for key, packed in columns.items():
        if len(packed) == 3:
            tensors[key] = deserialize_single_tensor(packed)
        elif len(packed) == 2:
            layout, rows = packed
            tensors[key] = torch.nested.as_nested_tensor(
                [deserialize_single_tensor(row) for row in rows], layout=getattr(torch, layout)
            )
        else:
            raise ValueError(f"column {key!r} is packed in {len(packed)} parts; expected 2 or 3")
    return TensorDict(tensors, batch_size=batch_size, device=device)
