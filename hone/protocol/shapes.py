"""Reshaping the rows of a DataProto, and saying in words what it holds.

Functions behind the methods of the same names. Leaves out anything that changes a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from hone.protocol.errors import ProtocolError

if TYPE_CHECKING:
    from hone.protocol.data_proto import DataProto

Column = TypeVar("Column", torch.Tensor, np.ndarray)


def unfold_column_chunks(
    data: DataProto, n_split: int, split_keys: Sequence[str] | None = None
) -> DataProto:
    """[B, n·k, …] of `split_keys` to [B·n, k, …]; the rows of the others repeated n times."""
    if n_split < 1:
        raise ProtocolError(f"columns cannot be cut into {n_split} pieces")
    chosen = set(split_keys or ())
    unknown = sorted(chosen - set(data.column_names()))
    if unknown:
        raise KeyError(f"batch has no columns {unknown} to cut; it has {data.column_names()}")

    def cut(name: str, value: Column) -> Column:
        if name not in chosen:
            if isinstance(value, np.ndarray):
                return value.repeat(n_split, axis=0)
            return value.repeat_interleave(n_split, dim=0)
        if value.ndim < 2 or value.shape[1] % n_split:
            raise ProtocolError(
                f"column {name!r} of shape {tuple(value.shape)} cannot be cut into {n_split} "
                "pieces along dim 1"
            )
        width = value.shape[1] // n_split
        return value.reshape(value.shape[0] * n_split, width, *value.shape[2:])

    batch = data.batch
    if batch is not None:
        tensors = {name: cut(name, value) for name, value in batch.items()}
        batch = TensorDict(tensors, batch_size=[len(data) * n_split])
    arrays = {name: cut(name, value) for name, value in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, dict(data.meta_info))


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """[B, …] to [new_batch_size, B / new_batch_size, …]."""
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise ProtocolError(
            f"a batch of {rows} rows does not fold into {new_batch_size} equal rows"
        )
    lead = (new_batch_size, rows // new_batch_size)
    return _with_lead(data, 1, lead)


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The leading `batch_dims` dimensions into one."""
    if data.batch is not None and len(data.batch.batch_size) < batch_dims:
        raise ProtocolError(
            f"a batch of size {tuple(data.batch.batch_size)} has no {batch_dims} leading dimensions"
        )
    return _with_lead(data, batch_dims, (-1,))


def _with_lead(data: DataProto, dims: int, lead: tuple[int, ...]) -> DataProto:
    def reshaped(value: Column) -> Column:
        if lead == (-1,):
            count = int(np.prod(value.shape[:dims], dtype=np.int64))
            return value.reshape(count, *value.shape[dims:])
        return value.reshape(*lead, *value.shape[dims:])

    batch = data.batch
    if batch is not None:
        size = reshaped(torch.empty(tuple(batch.batch_size), device="meta")).shape
        batch = TensorDict({k: reshaped(v) for k, v in batch.items()}, batch_size=size)
    arrays = {name: reshaped(array) for name, array in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, dict(data.meta_info))


def describe(data: DataProto) -> str:
    """One line a column: name, shape, dtype; then the meta_info keys."""
    lines = [f"{len(data)} rows"]
    for name in data.column_names():
        value = data.column(name)
        shape = "jagged" if getattr(value, "is_nested", False) else tuple(value.shape)
        device = f" {value.device}" if isinstance(value, torch.Tensor) else ""
        lines.append(f"  {name}: {shape} {getattr(value, 'dtype', 'nested')}{device}")
    for key, fact in data.meta_info.items():
        lines.append(f"  meta_info[{key!r}]: {type(fact).__name__}")
    return "\n".join(lines)


def memory(data: DataProto) -> str:
    """How much tensors and object columns take, in MiB."""
    in_tensors = 0
    if data.batch is not None:
        for value in data.batch.values(include_nested=True, leaves_only=True):
            flat = value.values() if value.is_nested else value
            in_tensors += flat.numel() * flat.element_size()
    in_arrays = sum(array.nbytes for array in data.non_tensor_batch.values())
    return f"tensors {in_tensors / 2**20:.3f} MiB, object columns {in_arrays / 2**20:.3f} MiB"
