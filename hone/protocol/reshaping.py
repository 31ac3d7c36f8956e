"""The methods of DataProto that remove or rename columns, reshape, iterate over or describe a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader

from hone.protocol.rows import Names, ProtocolError, check_columns_exist, select_columns, take_rows
from hone.types import Settings

if TYPE_CHECKING:
    from hone.protocol.data_proto import DataProto

T = TypeVar("T")
Column = TypeVar("Column", torch.Tensor, np.ndarray)


def pop_columns(
    data: DataProto,
    batch_keys: Names = None,
    non_tensor_batch_keys: Names = None,
    meta_info_keys: Names = None,
) -> DataProto:
    """Removes these columns and metadata and returns them as a new batch; None removes nothing."""
    names = batch_keys or [], non_tensor_batch_keys or [], meta_info_keys or []
    popped = select_columns(data, *names)
    sources = data.batch, data.non_tensor_batch, data.meta_info
    for source, keys in zip(sources, names, strict=True):
        for key in set(keys):
            del source[key]
    if popped.batch is not None and not len(popped.batch.keys()) and popped.non_tensor_batch:
        popped.batch = None
    return popped


def rename_columns(
    data: DataProto, old_keys: str | Names = None, new_keys: str | Names = None
) -> DataProto:
    """Renames tensor columns, in place."""
    old = [old_keys] if isinstance(old_keys, str) else list(old_keys or [])
    new = [new_keys] if isinstance(new_keys, str) else list(new_keys or [])
    if len(old) != len(new):
        raise ProtocolError(f"cannot rename {old} to {new}: the lists differ in length")
    check_columns_exist(old, data.batch.keys() if data.batch is not None else (), "tensor columns")
    if len(set(old)) < len(old) or len(set(new)) < len(new):
        raise ProtocolError(f"cannot rename {old} to {new}: a name occurs twice")
    columns = [data.batch.pop(name) for name in old]
    for name, column in zip(new, columns, strict=True):
        data.batch[name] = column
    return data


def unfold_column_chunks(
    data: DataProto, n_split: int, split_keys: Sequence[str] | None = None
) -> DataProto:
    """Reshapes `split_keys` from [B, n_split·k, …] to [B·n_split, k, …]; repeats rows of other columns."""
    if n_split < 1:
        raise ProtocolError(f"columns cannot be split into {n_split} pieces")
    split_names = set(split_keys or ())
    unknown = sorted(split_names - set(data.column_names()))
    if unknown:
        raise KeyError(f"batch has no columns {unknown} to split; it has {data.column_names()}")

    def split(name: str, value: Column) -> Column:
        if name not in split_names:
            return take_rows(value, torch.arange(len(data)).repeat_interleave(n_split))
        if value.ndim < 2 or value.shape[1] % n_split:
            raise ProtocolError(
                f"column {name!r} of shape {tuple(value.shape)} cannot be split into {n_split} "
                "pieces along dim 1"
            )
        length = value.shape[1] // n_split
        return value.reshape(value.shape[0] * n_split, length, *value.shape[2:])

    batch = data.batch
    if batch is not None:
        tensors = {name: split(name, value) for name, value in batch.items()}
        batch = TensorDict(tensors, batch_size=[len(data) * n_split])
    arrays = {name: split(name, value) for name, value in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, dict(data.meta_info))


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Reshapes [B, …] to [new_batch_size, B / new_batch_size, …]."""
    num_rows = len(data)
    if new_batch_size < 1 or num_rows % new_batch_size:
        raise ProtocolError(
            f"a batch of {num_rows} rows does not fold into {new_batch_size} groups of equal size"
        )
    return _reshape_batch_dims(data, 1, (new_batch_size, num_rows // new_batch_size))


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Flattens the leading `batch_dims` dimensions into one."""
    if data.batch is not None and len(data.batch.batch_size) < batch_dims:
        raise ProtocolError(
            f"a batch of size {tuple(data.batch.batch_size)} has fewer than {batch_dims} dimensions"
        )
    return _reshape_batch_dims(data, batch_dims, (-1,))


def _reshape_batch_dims(data: DataProto, num_dims: int, size: tuple[int, ...]) -> DataProto:
    """Reshapes the first `num_dims` dimensions of every column to `size`; (-1,) flattens them."""

    def reshape(value: Column) -> Column:
        if size == (-1,):  # reshape(-1, …) is ambiguous without rows
            num_rows = int(np.prod(value.shape[:num_dims], dtype=np.int64))
            return value.reshape(num_rows, *value.shape[num_dims:])
        return value.reshape(*size, *value.shape[num_dims:])

    batch = data.batch
    if batch is not None:
        # A tensor on the meta device has a shape but no data.
        batch_size = reshape(torch.empty(tuple(batch.batch_size), device="meta")).shape
        tensors = {name: reshape(tensor) for name, tensor in batch.items()}
        batch = TensorDict(tensors, batch_size=batch_size)
    arrays = {name: reshape(array) for name, array in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, dict(data.meta_info))


def iterate_epochs(
    num_rows: int,
    mini_batch_size: int,
    epochs: int,
    seed: int | None,
    select_rows: Callable[[Sequence[int]], T],
    dataloader_kwargs: Settings,
) -> Iterator[T]:
    """Yields the mini-batches of `epochs` passes, built from row indices by `select_rows`."""
    if mini_batch_size < 1 or num_rows % mini_batch_size:
        raise ProtocolError(
            f"mini_batch_size={mini_batch_size} does not divide a batch of {num_rows} rows"
        )
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader: DataLoader[T] = DataLoader(
        dataset=range(num_rows),  # type: ignore[arg-type]
        batch_size=mini_batch_size,
        collate_fn=select_rows,
        generator=generator,
        **dataloader_kwargs,
    )
    return (mini_batch for _ in range(epochs) for mini_batch in loader)


def describe(data: DataProto) -> str:
    """Returns lines with the name, shape and dtype of each column, then the meta_info keys."""
    lines = [f"{len(data)} rows"]
    for name in data.column_names():
        value = data.column(name)
        shape = "jagged" if getattr(value, "is_nested", False) else tuple(value.shape)
        device = f" {value.device}" if isinstance(value, torch.Tensor) else ""
        lines.append(f"  {name}: {shape} {getattr(value, 'dtype', 'nested')}{device}")
    for key, value in data.meta_info.items():
        lines.append(f"  meta_info[{key!r}]: {type(value).__name__}")
    return "\n".join(lines)


def describe_memory(data: DataProto) -> str:
    """Returns a line with the memory use of tensors and object columns, in MiB."""
    tensors = () if data.batch is None else data.batch.values(include_nested=True, leaves_only=True)
    tensor_bytes = sum((x.values() if x.is_nested else x).nbytes for x in tensors)
    array_bytes = sum(array.nbytes for array in data.non_tensor_batch.values())
    return f"tensors {tensor_bytes / 2**20:.3f} MiB, object columns {array_bytes / 2**20:.3f} MiB"
