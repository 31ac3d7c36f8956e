"""Operations on batches as TensorDicts, named as in `verl.utils.tensordict_utils`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from hone.protocol.padding import padded_index, unpadded_size
from hone.protocol.reshaping import iterate_epochs
from hone.protocol.rows import (
    ProtocolError,
    build_jagged_tensor,
    cat_rows,
    deeply_equal,
    union_tensor_dict,
)
from hone.protocol.tensordicts import Index, select_rows
from hone.protocol.tensordicts import chunk_tensordict as chunk_tensordict
from hone.protocol.tensordicts import concat_tensordict as concat_tensordict
from hone.protocol.tensordicts import (
    concat_tensordict_with_none_bsz as concat_tensordict_with_none_bsz,
)
from hone.types import Fields, JsonValue, Row, Settings

__all__ = ["union_tensor_dict"]

Column: TypeAlias = "Tensor | list | np.ndarray | NonTensorStack"
T = TypeVar("T")


def get_tensordict(
    tensor_dict: Mapping[str, Column], non_tensor_dict: Fields | None = None
) -> TensorDict:
    """Builds a TensorDict from columns and metadata; lists and arrays become NonTensorStack."""
    columns: Fields = {}
    sizes: dict[str, int] = {}
    for key, value in tensor_dict.items():
        if isinstance(value, Tensor) and value.is_nested and value.layout != torch.jagged:
            raise ProtocolError(f"column {key!r} is nested but not jagged; use layout=torch.jagged")
        if isinstance(value, Tensor | NonTensorStack):
            columns[key] = value
        elif isinstance(value, list | np.ndarray):
            columns[key] = _non_tensor_stack(key, value)
        else:
            raise ProtocolError(
                f"column {key!r} is a {type(value).__name__}; give a tensor, a list or an array"
            )
        sizes[key] = value.size(0) if isinstance(value, Tensor) else len(value)
    if len(set(sizes.values())) > 1:
        raise ProtocolError(f"the columns of a batch differ in their number of rows: {sizes}")
    metadata = non_tensor_dict or {}
    if duplicates := sorted(columns.keys() & metadata.keys()):
        raise ProtocolError(f"{duplicates} are both columns and metadata; rename one")
    size = [next(iter(sizes.values()))] if sizes else []
    columns |= {key: NonTensorData(unwrap_non_tensor_data(metadata[key])) for key in metadata}
    return TensorDict(columns, batch_size=size)


def assign_non_tensor_data(tensor_dict: TensorDict, key: str, val: T) -> None:
    """Sets one metadata entry, in place."""
    tensor_dict[key] = val if isinstance(val, NonTensorData) else NonTensorData(val)


def assign_non_tensor_stack(tensor_dict: TensorDict, key: str, val: Sequence[T]) -> None:
    """Sets a column of non-tensor values, in place."""
    tensor_dict[key] = _non_tensor_stack(key, val)


def assign_non_tensor(tensor_dict: TensorDict, **kwargs: JsonValue | NonTensorStack) -> TensorDict:
    """Sets lists as columns and other values as metadata, in place."""
    for key, value in kwargs.items():
        if isinstance(value, NonTensorStack):
            tensor_dict[key] = value
        elif isinstance(value, list):
            assign_non_tensor_stack(tensor_dict, key, value)
        else:
            assign_non_tensor_data(tensor_dict, key, value)
    return tensor_dict


def unwrap_non_tensor_data(data: T) -> T:
    """Returns the value of NonTensorData; other values are returned unchanged."""
    return data.data if isinstance(data, NonTensorData) else data


def get(tensordict: TensorDict, key: str, default: T | None = None) -> T | None:
    """Returns a tensor, a non-tensor column as a list, or a metadata value; `default` if there is none."""
    if key not in tensordict.keys():  # noqa: SIM118
        return default
    value = tensordict.get(key)
    return value.tolist() if isinstance(value, NonTensorStack) else unwrap_non_tensor_data(value)


get_non_tensor_data = get


def get_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Returns these columns and metadata as a new TensorDict; raises KeyError if one is missing."""
    names = list(keys)
    if missing := [key for key in names if key not in tensordict.keys()]:  # noqa: SIM118
        raise KeyError(f"the batch has no {missing}; it has {sorted(tensordict.keys())}")
    return tensordict.select(*names)


def pop(tensordict: TensorDict, key: str, default: T | None = None) -> T | None:
    """Like `get`, but removes the entry from the batch."""
    value = get(tensordict, key, default)
    tensordict.pop(key, None)
    return value


def pop_keys(tensordict: TensorDict, keys: Iterable[str]) -> TensorDict:
    """Like `get_keys`, but removes the entries from the batch."""
    names = list(keys)
    popped = get_keys(tensordict, names)
    for key in names:
        tensordict.pop(key)
    return popped


def nested_tensor_from_tensor_list(
    tensors: Sequence[Tensor], ragged_idx: int | None = None
) -> Tensor:
    """Builds a jagged tensor whose ragged dimension is `ragged_idx`, by default the last one."""
    return build_jagged_tensor(list(tensors), ragged_idx or tensors[0].dim())


def concat_nested_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates the rows of several jagged tensors."""
    return cat_rows(list(tensors))


def index_select_tensor_dict(batch: TensorDict | None, indices: Index | slice) -> TensorDict | None:
    """Returns a batch with the rows at `indices` of every column, and with the same metadata."""
    return None if batch is None else select_rows(batch, indices)


def make_iterator(
    tensordict: TensorDict,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Settings | None = None,
) -> Iterator[TensorDict]:
    """Yields mini-batches for `epochs` passes."""
    select = functools.partial(select_rows, tensordict)
    return iterate_epochs(
        len(tensordict), mini_batch_size, epochs, seed, select, dataloader_kwargs or {}
    )


def assert_tensordict_eq(tensordict1: TensorDict, tensordict2: TensorDict) -> None:
    """Raises an AssertionError if columns or metadata of the two batches differ."""
    names = set(tensordict1.keys())
    if names != set(tensordict2.keys()):
        raise ProtocolError(f"columns {sorted(names)} and {sorted(tensordict2.keys())} differ")
    for key in names:
        if not deeply_equal(get(tensordict1, key), get(tensordict2, key)):
            raise ProtocolError(f"column {key!r} differs")


def pad_to_divisor(data: TensorDict, size_divisor: int) -> tuple[TensorDict, int]:
    """Repeats rows from the start, up to a multiple of `size_divisor` rows.

    Returns the batch and the number of added rows.
    """
    index = padded_index(len(data), size_divisor)
    pad_size = len(index) - len(data)
    return (select_rows(data, index) if pad_size else data), pad_size


def unpad(data: TensorDict, pad_size: int) -> TensorDict:
    """Drops the last `pad_size` rows."""
    return select_rows(data, slice(0, unpadded_size(len(data), pad_size))) if pad_size else data


def contiguous(data: TensorDict) -> TensorDict:
    """Returns a new TensorDict with contiguous tensors."""
    columns: Fields = {}
    for key in data.keys():  # noqa: SIM118
        value = data.get(key)
        columns[key] = value.contiguous() if isinstance(value, Tensor) else value
    return TensorDict(columns, batch_size=data.batch_size)


def list_of_dict_to_tensordict(list_of_dicts: Sequence[Row]) -> TensorDict:
    """Builds a batch with one row per dict; tensors of different shapes become a jagged tensor."""
    if not list_of_dicts:
        raise ProtocolError("cannot build a batch: the list of rows is empty")
    columns: Fields = {}
    for key in list_of_dicts[0]:
        values = [row[key] for row in list_of_dicts]
        if not all(isinstance(value, Tensor) for value in values):
            columns[key] = _non_tensor_stack(key, values)
        elif len({value.shape for value in values}) == 1:
            columns[key] = torch.stack(values)
        else:
            columns[key] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return TensorDict(columns, batch_size=[len(list_of_dicts)])


def maybe_fix_3d_position_ids(data: TensorDict) -> None:
    """Does nothing, because jagged columns keep their ragged dimension, unlike in verl."""


def _non_tensor_stack(key: str, values: Sequence[T] | np.ndarray) -> NonTensorStack:
    if any(isinstance(value, Tensor) for value in values):
        raise ProtocolError(f"column {key!r} is a list of tensors; stack them, or give arrays")
    return NonTensorStack.from_list([NonTensorData(value) for value in values])
