"""DataProto, the batch of rows that the training loop and the workers exchange.

Tensors, object arrays and metadata are split, concatenated and repeated together. The columns are
declared in hone.columns; this module does not depend on Ray.
"""

from __future__ import annotations

import logging
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, overload

import numpy as np
import torch
from tensordict import TensorDict

from hone.protocol import reshaping
from hone.protocol.padding import AUTO_PADDING_KEY, append_copies, padding_enabled
from hone.protocol.rows import (
    Index,
    ProtocolError,
    build_tensordict,
    column_array,
    concat_batches,
    row_indices,
    select_columns,
    take_batch,
    union_dicts,
    union_numpy_dict,
    union_tensor_dict,
)
from hone.protocol.wire import (
    PackedTensorDict,
    decode_tensordict,
    decode_verl_tensors,
    encode_tensordict,
    join_tensordict,
    load,
    save,
    split_tensordict,
)
from hone.types import Fields, Settings

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DataProtoItem:
    """One row of a DataProto."""

    batch: TensorDict | None
    non_tensor_batch: Fields = field(default_factory=dict)
    meta_info: Fields = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """A batch: tensor columns, object columns, and metadata of the whole batch."""

    batch: TensorDict = None  # may be None; the type omits None, so that callers need no check
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)  # None means no columns
    meta_info: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    # -- construction -----------------------------------------------------------------------

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: Fields | None = None,
        meta_info: Fields | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> DataProto:
        """Builds a batch from columns; lists of equal length become the rows of a 2-d object array."""
        if num_batch_dims < 1 or (non_tensors and num_batch_dims > 1):
            raise ProtocolError(
                f"num_batch_dims={num_batch_dims}: a batch has at least 1 dimension, and object columns "
                "have one batch dimension; use fold_batch_dim on the batch instead"
            )
        batch = build_tensordict(tensors, num_batch_dims) if tensors else None
        arrays = {key: column_array(value) for key, value in (non_tensors or {}).items()}
        info = dict(meta_info or {})
        if auto_padding:
            info[AUTO_PADDING_KEY] = True
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=info)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, torch.Tensor | np.ndarray],
        meta_info: Fields | None = None,
        auto_padding: bool = False,
    ) -> DataProto:
        """Builds a batch from one dict of torch tensors and numpy arrays."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        for name, column in data.items():
            if not isinstance(column, torch.Tensor | np.ndarray):
                raise ProtocolError(
                    f"column {name!r} is a {type(column).__name__}; give a torch.Tensor or np.ndarray"
                )
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDict | None, meta_info: Fields | None = None
    ) -> DataProto:
        """Converts NonTensorStack to object columns and NonTensorData to meta_info."""
        if tensor_dict is None:
            return cls(meta_info=dict(meta_info or {}))
        tensors, arrays, info = split_tensordict(tensor_dict)
        batch = TensorDict(tensors, batch_size=tensor_dict.batch_size) if tensors else None
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=info | dict(meta_info or {}))

    def to_tensordict(self) -> TensorDict:
        """Converts object columns to NonTensorStack and meta_info to NonTensorData."""
        return join_tensordict(self.batch, self.non_tensor_batch, self.meta_info, len(self))

    def check_consistency(self) -> None:
        """Raises ProtocolError unless every column has one entry per row."""
        if self.batch is not None and len(self.batch.batch_size) == 0:
            raise ProtocolError("batch has no batch dimension; build it with batch_size=[rows]")
        num_rows = len(self)
        for key, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray):
                raise ProtocolError(
                    f"object column {key!r} is a {type(array).__name__}; wrap it in a numpy array"
                )
            if array.ndim == 0 or len(array) != num_rows:
                size = "no batch dimension" if array.ndim == 0 else f"{len(array)} rows"
                raise ProtocolError(f"object column {key!r} has {size}; the batch has {num_rows}")

    # -- access -----------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"DataProto({len(self)} rows: {self.column_names()}; {sorted(self.meta_info)})"

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        for array in self.non_tensor_batch.values():
            return len(array) if np.ndim(array) else 0
        return 0

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...

    @overload
    def __getitem__(self, item: Index) -> DataProto: ...

    def __getitem__(self, item: int | Index) -> DataProtoItem | DataProto:
        """Returns a DataProtoItem for an int, and a DataProto for a slice, indices or a mask."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, list | tuple | np.ndarray | torch.Tensor) and np.ndim(item) > 0:
            return self.select_idxs(item)
        is_bool = isinstance(item, bool) or getattr(item, "dtype", None) in (np.bool_, torch.bool)
        if is_bool or not isinstance(item, SupportsIndex):
            raise TypeError(f"a batch is indexed by row, not by {type(item).__name__} {item!r}")
        row = operator.index(item)
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} is out of range: the batch has {len(self)} rows")
        arrays = {key: array[row] for key, array in self.non_tensor_batch.items()}
        batch = self.batch[row] if self.batch is not None else None
        return DataProtoItem(batch, arrays, self.meta_info)

    def has_column(self, name: str) -> bool:
        """Whether `name` is a tensor or object column."""
        return name in self.column_names()

    def column(self, name: str) -> Any:
        """Returns the tensor or object array of this name."""
        if not self.has_column(name):
            raise KeyError(f"batch has no column {name!r}; it has {self.column_names()}")
        return self.non_tensor_batch[name] if name in self.non_tensor_batch else self.batch[name]

    def column_names(self) -> list[str]:
        """Returns the names of the tensor columns, then those of the object columns, each sorted."""
        tensors = sorted(self.batch.keys()) if self.batch is not None else []
        return tensors + sorted(self.non_tensor_batch)

    def set_column(self, name: str, value: torch.Tensor | np.ndarray) -> None:
        """Adds or replaces a column, which must have as many rows as the batch."""
        if self.column_names() and len(value) != len(self):
            raise ProtocolError(f"column {name!r} has {len(value)} rows; the batch has {len(self)}")
        if isinstance(value, np.ndarray):
            if self.batch is not None:
                self.batch.pop(name, None)
            self.non_tensor_batch[name] = value
            return
        self.non_tensor_batch.pop(name, None)
        if self.batch is None:
            self.batch = TensorDict({}, batch_size=[len(value)])
        self.batch[name] = value

    def drop_column(self, name: str) -> None:
        """Removes a column."""
        if not self.has_column(name):
            raise KeyError(f"batch has no column {name!r} to drop; it has {self.column_names()}")
        if self.non_tensor_batch.pop(name, None) is None:
            del self.batch[name]
            if not len(self.batch.keys()) and self.non_tensor_batch:
                self.batch = None

    get_data_info = reshaping.describe

    def print_size(self, prefix: str = "") -> str:
        """Logs and returns the memory use of tensors and object columns."""
        text = f"{prefix} {reshaping.describe_memory(self)}".strip()
        logger.info(text)
        return text

    # -- columns ----------------------------------------------------------------------------

    select = select_columns
    pop = reshaping.pop_columns
    rename = reshaping.rename_columns

    def union(self, other: DataProto) -> DataProto:
        """Adds the columns and metadata of `other` to this batch; shared entries must be equal."""
        if self.column_names() and other.column_names() and len(self) != len(other):
            raise ProtocolError(
                f"cannot unite a batch of {len(self)} rows with a batch of {len(other)} rows"
            )
        batch = union_tensor_dict(None if self.batch is None else self.batch.copy(), other.batch)
        arrays = union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        info = union_dicts(self.meta_info, other.meta_info, "meta_info")
        self.batch, self.non_tensor_batch, self.meta_info = batch, arrays, info
        return self

    def to(self, device: torch.device | str) -> DataProto:
        """Moves the tensors to a device, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # -- rows -------------------------------------------------------------------------------

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> DataProto:
        """Returns rows start:end:step; tensors are views if the step is positive."""
        index = slice(start, end, step)
        if step is not None and step < 0:  # torch has no negative steps
            return self.select_idxs(range(len(self))[index])
        return take_batch(self, index)

    def select_idxs(self, idxs: Index) -> DataProto:
        """Selects rows by an index list, array or tensor, or by a boolean mask."""
        return take_batch(self, row_indices(idxs, len(self)))

    def reorder(self, indices: Index) -> None:
        """Reorders the rows, in place."""
        reordered = self.select_idxs(indices)
        if len(reordered) != len(self):
            raise ProtocolError(f"{len(reordered)} indices cannot reorder {len(self)} rows")
        self.batch, self.non_tensor_batch = reordered.batch, reordered.non_tensor_batch

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Repeats each row `repeat_times` times: AABB with `interleave`, else ABAB."""
        if repeat_times < 0:
            raise ProtocolError(f"rows cannot be repeated {repeat_times} times")
        rows = torch.arange(len(self))
        index = rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times)
        return take_batch(self, index)

    def sample_level_repeat(
        self, repeat_times: Sequence[int] | np.ndarray | torch.Tensor
    ) -> DataProto:
        """Repeats row i `repeat_times[i]` times, in order."""
        times = torch.as_tensor(np.asarray(repeat_times), dtype=torch.long)
        if times.ndim != 1 or len(times) != len(self):
            raise ProtocolError(
                f"repeat_times has shape {tuple(times.shape)}; the batch has {len(self)} rows"
            )
        return take_batch(self, torch.arange(len(self)).repeat_interleave(times))

    def chunk(self, chunks: int) -> list[DataProto]:
        """Splits the batch into `chunks` parts; raises if they are unequal and padding is not enabled."""
        if chunks < 1:
            raise ProtocolError(f"a batch cannot be split into {chunks} chunks")
        if len(self) % chunks and not self.is_padding_enabled():
            raise ProtocolError(
                f"a batch of {len(self)} rows does not divide into {chunks} equal chunks; pad it with "
                "pad_dataproto_to_divisor, or build it with auto_padding=True"
            )
        length = math.ceil(len(self) / chunks)
        return [self.slice(i * length, (i + 1) * length) for i in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Splits the batch into parts of `split_size` rows; the last may be shorter."""
        if split_size < 1:
            raise ProtocolError(f"a batch cannot be split into parts of {split_size} rows")
        return [self.slice(i, i + split_size) for i in range(0, len(self), split_size)]

    concat = staticmethod(concat_batches)

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Settings | None = None,
    ) -> Iterator[DataProto]:
        """Yields mini-batches for `epochs` passes; `dataloader_kwargs` may set `shuffle`."""
        return reshaping.iterate_epochs(
            len(self), mini_batch_size, epochs, seed, self.select_idxs, dataloader_kwargs or {}
        )

    # -- shapes -----------------------------------------------------------------------------

    unfold_column_chunks = reshaping.unfold_column_chunks
    fold_batch_dim = reshaping.fold_batch_dim
    unfold_batch_dim = reshaping.unfold_batch_dim

    # -- padding ----------------------------------------------------------------------------

    is_padding_enabled = padding_enabled
    padding = append_copies

    # -- serialization ----------------------------------------------------------------------

    def __getstate__(self) -> Fields:
        return {
            "batch": encode_tensordict(self.batch),
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": self.meta_info,
        }

    def __setstate__(
        self, state: Fields | tuple[PackedTensorDict | bytes | None, dict[str, np.ndarray], Fields]
    ) -> None:
        if isinstance(state, tuple):  # verl's format
            self.batch = decode_verl_tensors(state[0])
            self.non_tensor_batch, self.meta_info = state[1:]
            return
        self.batch = decode_tensordict(state["batch"])
        self.non_tensor_batch, self.meta_info = state["non_tensor_batch"], state["meta_info"]

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Writes the batch to a file, atomically."""
        save(self, filepath)

    @staticmethod
    def load_from_disk(filepath: str | os.PathLike[str]) -> DataProto:
        """Reads a batch that hone or verl saved.

        Raises UnsafeObject if the file has other objects than plain values, arrays and tensors.
        """
        return load(filepath, DataProto)


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Stacks items into a batch; all must have the same columns."""
    if not x:
        raise ProtocolError("nothing to collate: the list of rows is empty")
    names = x[0].non_tensor_batch.keys()
    for number, item in enumerate(x):
        if item.non_tensor_batch.keys() != names or (item.batch is None) != (x[0].batch is None):
            raise ProtocolError(f"row {number} does not have the columns of row 0")
    arrays = {name: column_array([item.non_tensor_batch[name] for item in x]) for name in names}
    tensors = [item.batch for item in x if item.batch is not None]
    return DataProto(torch.stack(tensors).contiguous() if tensors else None, arrays)
