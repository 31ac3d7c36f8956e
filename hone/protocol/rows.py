"""Operations on columns (dense and jagged tensors, numpy arrays) and their rows, and deep equality.

`DataProto` selects, concatenates, merges and compares columns and rows with these functions.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from hone.types import Fields, JsonValue

if TYPE_CHECKING:
    from hone.protocol.data_proto import DataProto

T = TypeVar("T")
Column = TypeVar("Column", torch.Tensor, np.ndarray)
Names: TypeAlias = Sequence[str] | None
"""Names of columns or of entries of meta_info."""
Index: TypeAlias = slice | Sequence[int] | np.ndarray | torch.Tensor
"""Row indices or a boolean mask."""
_NON_TENSORS = (NonTensorData, NonTensorStack)
_TYPES_WITH_NAN = (float, complex, np.inexact, np.datetime64, np.timedelta64)


class ProtocolError(ValueError, AssertionError):
    """Columns, rows or metadata do not match; an AssertionError, as in verl."""


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns `x` on the device; a copy to a GPU is asynchronous, in stream order."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def column_array(values: Sequence[JsonValue] | np.ndarray) -> np.ndarray:
    """Converts values to an object array; nested lists of equal length become further dimensions."""
    if isinstance(values, np.ndarray):
        return values
    shape = [len(values)]
    items: list[Any] = list(values)
    while items and all(isinstance(item, list | tuple) for item in items):
        if len({len(item) for item in items}) > 1:
            break
        shape.append(len(items[0]))
        items = [inner for item in items for inner in item]
    return object_array(items).reshape(shape)


def row_dicts(columns: Mapping[str, np.ndarray]) -> list[Fields]:
    """Returns each row of the columns as a dict."""
    values = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row_values, strict=True)) for row_values in values]


def object_array(values: Sequence[T] | np.ndarray) -> np.ndarray:
    """Returns a 1-d object array with one element per value, even for lists; returns an array unchanged."""
    if isinstance(values, np.ndarray):
        return values
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


def build_jagged_tensor(rows: list[torch.Tensor], ragged_idx: int | None) -> torch.Tensor:
    """Builds a jagged tensor whose ragged dimension is `ragged_idx`, by default 1."""
    if ragged_idx is None or rows[0].dim() == 1:
        return torch.nested.nested_tensor(rows, layout=torch.jagged)
    values = torch.cat(rows, dim=ragged_idx - 1)
    lengths = torch.tensor([row.shape[ragged_idx - 1] for row in rows], device=values.device)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged_idx)


def take_rows(value: Column, index: Index) -> Column:
    """Returns the rows at `index` of a tensor, a TensorDict or an array; a slice gives a view."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        rows, ragged_idx = list(value.unbind()), getattr(value, "_ragged_idx", None)
        if not rows:
            return value
        selected_rows = rows[index] if isinstance(index, slice) else [rows[int(i)] for i in index]
        if selected_rows:
            return build_jagged_tensor(selected_rows, ragged_idx)
        # A jagged tensor without rows has the dtype and the other dimensions of the first row.
        first_row = build_jagged_tensor(rows[:1], ragged_idx)
        ragged_idx = first_row._ragged_idx  # type: ignore[attr-defined]
        return torch.nested.nested_tensor_from_jagged(
            first_row.values().narrow(ragged_idx - 1, 0, 0),
            offsets=first_row.offsets()[:1],  # type: ignore[attr-defined]
            jagged_dim=ragged_idx,
        )
    if isinstance(value, np.ndarray) and isinstance(index, torch.Tensor):
        return value[index.numpy()]
    return value[index]


def select_columns(
    data: DataProto,
    batch_keys: Names = None,
    non_tensor_batch_keys: Names = None,
    meta_info_keys: Names = None,
    deepcopy: bool = False,
) -> DataProto:
    """Returns a batch with only these columns and metadata; None selects all of that kind."""
    batch = data.batch
    if batch is not None:
        names = list(batch.keys()) if batch_keys is None else list(batch_keys)
        check_columns_exist(names, batch.keys(), "tensor columns")
        batch = TensorDict({name: batch[name] for name in names}, batch_size=batch.batch_size)
    elif batch_keys:
        check_columns_exist(batch_keys, (), "tensor columns")
    arrays = pick_entries(data.non_tensor_batch, non_tensor_batch_keys, "object columns")
    info = pick_entries(data.meta_info, meta_info_keys, "meta_info")
    if deepcopy:
        batch = batch.clone() if batch is not None else None
        arrays, info = copy.deepcopy(arrays), copy.deepcopy(info)
    return type(data)(batch, arrays, info)


def check_columns_exist(names: Sequence[str], available: Collection[str], kind: str) -> None:
    """Raises a KeyError if names are missing; the error lists the available names."""
    missing = [name for name in names if name not in available]
    if missing:
        raise KeyError(f"batch has no {missing} among its {kind}; it has {sorted(available)}")


def pick_entries(source: dict[str, T], keys: Sequence[str] | None, kind: str) -> dict[str, T]:
    """Returns the entries of a dict with these keys; None selects all."""
    if keys is None:
        return dict(source)
    check_columns_exist(keys, source, kind)
    return {key: source[key] for key in keys}


def take_batch(data: DataProto, index: Index) -> DataProto:
    """Returns a batch with the rows at `index` of every column, and with the same metadata."""
    batch = data.batch
    if batch is not None:
        if len(batch.keys()):
            tensors = {key: take_rows(value, index) for key, value in batch.items()}
            num_rows = len(next(iter(tensors.values())))
        else:
            tensors, num_rows = {}, len(take_rows(np.arange(len(data)), index))
        batch = TensorDict(tensors, batch_size=(num_rows, *batch.batch_size[1:]))
    arrays = {key: take_rows(array, index) for key, array in data.non_tensor_batch.items()}
    return type(data)(batch, arrays, dict(data.meta_info))


def cat_rows(values: list[Column]) -> Column:
    """Concatenates one column of several batches along dim 0."""
    first = values[0]
    if isinstance(first, np.ndarray):
        has_objects = any(value.dtype == object for value in values)
        if has_objects and len({value.shape[1:] for value in values}) > 1:
            # In some batches, lists of equal length became a 2-d array; all arrays must be 1-d.
            values = [object_array(value.tolist()) for value in values]
        return np.concatenate(values, axis=0)
    if isinstance(first, torch.Tensor) and first.is_nested:
        rows = [row for value in values for row in value.unbind()]
        return build_jagged_tensor(rows, getattr(first, "_ragged_idx", None)) if rows else first
    return torch.cat(values, dim=0)


def cat_columns(batches: list[dict[str, Column]], kind: str) -> dict[str, Column]:
    """Concatenates each column of the batches, which must have the same columns."""
    names = batches[0].keys()
    for number, batch in enumerate(batches):
        if batch.keys() != names:
            unmatched = sorted(batch.keys() ^ names)
            raise ProtocolError(
                f"cannot concatenate: {kind} {unmatched} are not in both batch 0 and batch {number}"
            )
    result = {}
    for name in names:
        values = [batch[name] for batch in batches]
        try:
            result[name] = cat_rows(values)
        except (RuntimeError, ValueError) as error:
            shapes = [tuple(value.shape) for value in values]
            raise ProtocolError(
                f"cannot concatenate {name!r} of shapes {shapes}: {error}"
            ) from error
    return result


def join_meta_info(infos: list[Fields]) -> Fields:
    """Merges metadata; `metrics` becomes a dict of lists, other values must be equal."""
    merged: Fields = {}
    metrics: list[Fields] = []
    for number, info in enumerate(infos):
        for key, value in info.items():
            if key == "metrics":
                metrics.extend(value if isinstance(value, list) else [value or {}])
            elif not deeply_equal(merged.setdefault(key, value), value):
                raise ProtocolError(
                    f"cannot concatenate: meta_info[{key!r}] is {merged[key]!r} in an earlier "
                    f"batch and {value!r} in batch {number}; put values that differ under 'metrics'"
                )
    if metrics:
        values_by_name: Fields = {}
        for entry in metrics:
            for name, value in entry.items():
                values_by_name.setdefault(name, []).append(value)
        merged["metrics"] = values_by_name
    return merged


def concat_batches(data: Sequence[DataProto]) -> DataProto:
    """Concatenates batches along the rows."""
    if not data:
        raise ProtocolError("nothing to concatenate: the list of batches is empty")
    batch_class = type(data[0])
    info = join_meta_info([batch.meta_info for batch in data])
    arrays = cat_columns([batch.non_tensor_batch for batch in data], "object columns")
    tensordicts = [batch.batch for batch in data if batch.batch is not None]
    if not tensordicts:
        return batch_class(None, arrays, info)
    if len(tensordicts) < len(data):
        raise ProtocolError("cannot concatenate batches of which only some have tensors")
    tensors = cat_columns([dict(td.items()) for td in tensordicts], "tensor columns")
    size = (sum(len(batch) for batch in data), *tensordicts[0].batch_size[1:])
    return batch_class(TensorDict(tensors, batch_size=size), arrays, info)


def build_tensordict(tensors: dict[str, torch.Tensor], num_batch_dims: int) -> TensorDict:
    """Builds a TensorDict from tensor columns, whose leading dimensions must agree."""
    sizes: dict[str, tuple[int, ...]] = {}
    for name, column in tensors.items():
        is_nested = getattr(column, "is_nested", False)  # a numpy array has no such attribute
        sizes[name] = (column.size(0),) if is_nested else tuple(column.shape[:num_batch_dims])
    first_name, batch_size = next(iter(sizes.items()))
    for name, size in sizes.items():
        if len(size) < num_batch_dims:
            raise ProtocolError(
                f"column {name!r} has {len(size)} dimensions; num_batch_dims is {num_batch_dims}"
            )
        if size != batch_size:
            raise ProtocolError(
                f"column {name!r} has batch size {size}; column {first_name!r} has {batch_size}: "
                "all columns of a batch have one row per sample"
            )
    return TensorDict(tensors, batch_size=batch_size)


def row_indices(idxs: Index, num_rows: int) -> torch.Tensor:
    """Converts a list, array, tensor or mask to row indices; raises if one is out of range."""
    index = idxs.cpu() if isinstance(idxs, torch.Tensor) else torch.from_numpy(np.array(idxs))
    if index.numel() == 0:
        index = index.reshape(-1)
    if index.ndim != 1:
        raise ProtocolError(f"row indices must be 1-d, not of shape {tuple(index.shape)}")
    if index.dtype == torch.bool:
        if len(index) != num_rows:
            raise ProtocolError(f"the mask has {len(index)} rows, but the batch has {num_rows}")
        return index.nonzero().reshape(-1)
    if len(index) and (index.is_floating_point() or index.is_complex()):
        raise ProtocolError(f"row indices must be integers or a bool mask, not {index.dtype}")
    index = index.long()
    if len(index) and not -num_rows <= int(index.min()) <= int(index.max()) < num_rows:
        bounds = f"{int(index.min())}..{int(index.max())}"
        raise IndexError(f"rows {bounds} are out of range: the batch has {num_rows} rows")
    return index


def union_tensor_dict(first: TensorDict | None, second: TensorDict | None) -> TensorDict | None:
    """Adds the columns of `second` to `first`, in place; shared columns must be equal."""
    if first is None or second is None:
        return first if second is None else second
    if first.batch_size != second.batch_size:
        raise ProtocolError(
            f"cannot unite tensors of batch size {tuple(first.batch_size)} with "
            f"{tuple(second.batch_size)}"
        )
    columns, more_columns = ({key: td.get(key) for key in td.keys()} for td in (first, second))  # noqa: SIM118
    union_dicts(columns, more_columns, "column")
    return first.update({key: more_columns[key] for key in more_columns if key not in columns})


def union_numpy_dict(
    first: dict[str, np.ndarray], second: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Merges object columns; shared columns must be equal."""
    return union_dicts(first, second, "object column")


def union_dicts(first: dict[str, T], second: dict[str, T], kind: str) -> dict[str, T]:
    """Merges two dicts; raises ProtocolError if a shared key has two values."""
    for key in first.keys() & second.keys():
        if not deeply_equal(first[key], second[key]):
            raise ProtocolError(
                f"cannot unite two batches: their {kind} {key!r} differs; "
                "pop or rename it in one of them first"
            )
    return first | second


def deeply_equal(a: Any, b: Any, _outer_pairs: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Whether two values are deeply equal; NaN equals NaN, and a value may contain itself.

    `_outer_pairs` has the ids of the pairs of values that contain `a` and `b`.
    """
    pair = (id(a), id(b))
    if a is b or pair in _outer_pairs:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensor(a, b)
    are_equal = functools.partial(deeply_equal, _outer_pairs=_outer_pairs | {pair})
    if is_tensor_collection(a) and is_tensor_collection(b):
        if isinstance(a, _NON_TENSORS) or isinstance(b, _NON_TENSORS):
            return type(a) is type(b) and are_equal(a.tolist(), b.tolist())
        return a.batch_size == b.batch_size and are_equal(dict(a), dict(b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape == b.shape and object in (a.dtype, b.dtype):
            return all(map(are_equal, a.ravel(), b.ravel()))
        may_have_nan = a.dtype.kind == b.dtype.kind and a.dtype.kind in "fcmM"
        return bool(np.array_equal(a, b, equal_nan=may_have_nan))
    if any(isinstance(x, torch.Tensor | np.ndarray) or is_tensor_collection(x) for x in (a, b)):
        return False
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(are_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(are_equal, a, b))
    if isinstance(a, _TYPES_WITH_NAN) and isinstance(b, _TYPES_WITH_NAN) and a != a and b != b:
        return True
    return bool(a == b)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.is_nested != b.is_nested:
        return False
    if a.is_nested:
        return a.size(0) == b.size(0) and all(map(_same_tensor, a.unbind(), b.unbind()))
    if a.shape != b.shape:
        return False
    b = b.to(a.device)
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)
