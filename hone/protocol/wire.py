"""Serializes a DataProto for other processes and for files.

Tensors are sent as numpy views, which pickle protocol 5 transfers without a copy; they arrive on
the CPU. Files may contain only plain values, arrays and tensors, so that loading a file runs no
code that the file names.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from hone.protocol.rows import ProtocolError, object_array
from hone.types import Fields, Function, JsonValue

T = TypeVar("T")
EncodedValue: TypeAlias = tuple[str, Any, Any]
"""The kind of a column, its payload, and further data that depends on the kind."""
PackedTensor = tuple[str, tuple[int, ...], np.ndarray]
"""verl's format of a tensor: dtype name, shape, and the bytes as a numpy array."""
PackedColumn = PackedTensor | tuple[str, list[PackedTensor]]
"""A dense tensor, or the layout and the rows of a nested one."""
PackedTensorDict = tuple[tuple[int, ...], str | None, dict[str, PackedColumn]]
"""verl's format of a TensorDict: batch size, device name and columns."""

_INTEGER_BY_ITEMSIZE = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def encode_tensor(tensor: torch.Tensor) -> EncodedValue:
    """Encodes a tensor: ("dense", array, dtype name) or ("jagged", values, (offsets, ragged dim))."""
    if tensor.is_nested:
        if tensor.layout != torch.jagged:
            tensor = torch.nested.nested_tensor(list(tensor.unbind()), layout=torch.jagged)
        offsets, ragged_dim = tensor.offsets(), getattr(tensor, "_ragged_idx", 1)  # type: ignore[attr-defined]
        return "jagged", encode_tensor(tensor.values()), (encode_tensor(offsets), ragged_dim)
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    dtype_name = str(dense.dtype).removeprefix("torch.")
    try:
        return "dense", dense.numpy(), dtype_name
    except TypeError:  # numpy lacks the dtype: send the bits as integers of the same width
        bits = dense.reshape(-1).view(_INTEGER_BY_ITEMSIZE[dense.element_size()])
        return "dense", bits.reshape(dense.shape).numpy(), dtype_name


def decode_tensor(kind: str, payload: Any, extra: Any) -> torch.Tensor:
    """Inverts `encode_tensor`; the tensor shares the memory of the array if that is writeable."""
    if kind == "jagged":
        values, offsets = decode_tensor(*payload), decode_tensor(*extra[0])
        return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=extra[1])
    # Read-only memory is Ray's object store, which other ranks share: an in-place operation would
    # change the data of other ranks.
    tensor = torch.from_numpy(payload if payload.flags.writeable else payload.copy())
    dtype = getattr(torch, extra)
    if tensor.dtype == dtype:
        return tensor
    return tensor.reshape(-1).view(dtype).reshape(payload.shape)


def encode_tensordict(batch: TensorDict | None) -> Fields | None:
    """Encodes a TensorDict as plain containers and numpy arrays."""
    if batch is None:
        return None
    entries: dict[str, EncodedValue] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            entries[key] = encode_tensor(value)
        elif isinstance(value, TensorDict):
            entries[key] = ("tensordict", encode_tensordict(value), None)
        else:
            entries[key] = ("object", value, None)
    return {"batch_size": tuple(batch.batch_size), "entries": entries}


def decode_tensordict(state: Fields | None) -> TensorDict | None:
    """Inverts `encode_tensordict`, on the CPU."""
    if state is None:
        return None
    columns: Fields = {}
    for key, (kind, payload, extra) in state["entries"].items():
        if kind == "tensordict":
            columns[key] = decode_tensordict(payload)
        elif kind == "object":
            columns[key] = payload
        else:
            columns[key] = decode_tensor(kind, payload, extra)
    return TensorDict(columns, batch_size=state["batch_size"])


def decode_verl_tensors(state: bytes | PackedTensorDict | None) -> TensorDict | None:
    """Decodes the tensors of a DataProto that verl pickled, without running code from the pickle."""
    if isinstance(state, bytes):
        return torch.load(io.BytesIO(state), weights_only=True, map_location="cpu")
    return None if state is None else deserialize_tensordict(state)


def split_tensordict(source: TensorDict) -> tuple[Fields, dict[str, np.ndarray], Fields]:
    """Returns the tensors, object columns and metadata of a TensorDict."""
    tensors: Fields = {}
    arrays: dict[str, np.ndarray] = {}
    metadata: Fields = {}
    for key in source.keys():  # noqa: SIM118
        value = source.get(key)
        if isinstance(value, NonTensorStack):
            arrays[key] = _object_column(value.tolist())
        elif isinstance(value, NonTensorData):
            metadata[key] = value.data
        else:
            tensors[key] = value
    return tensors, arrays, metadata


def join_tensordict(
    batch: TensorDict | None, arrays: dict[str, np.ndarray], metadata: Fields, num_rows: int
) -> TensorDict:
    """Inverts `split_tensordict`; without tensors, the batch has `num_rows` rows."""
    tensors = {} if batch is None else dict(batch.items())
    name_counts = Counter([*tensors, *arrays, *metadata])
    if duplicates := sorted(name for name, count in name_counts.items() if count > 1):
        raise ProtocolError(
            f"the names {duplicates} are used by more than one tensor column, object column or "
            "meta_info entry; rename one"
        )
    size = batch.batch_size if batch is not None else [num_rows]
    stacks = {key: NonTensorStack(*map(NonTensorData, array)) for key, array in arrays.items()}
    entries = {key: NonTensorData(value, batch_size=size) for key, value in metadata.items()}
    return TensorDict(tensors | stacks | entries, batch_size=size)


def _object_column(values: list[JsonValue | np.ndarray]) -> np.ndarray:
    """Builds an object column; rows that are object arrays of one shape are stacked."""
    arrays = [v for v in values if isinstance(v, np.ndarray) and v.dtype == object]
    if arrays and len(arrays) == len(values) and len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    return object_array(values)


def serialize_single_tensor(obj: torch.Tensor) -> PackedTensor:
    """Packs one dense tensor as (dtype name, shape, bytes), as in verl."""
    data = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), data.numpy()


def deserialize_single_tensor(arr: PackedTensor) -> torch.Tensor:
    """Inverts `serialize_single_tensor`; the tensor owns its memory."""
    dtype_name, shape, data = arr
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype_name!r} is not a torch dtype")
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8)).view(dtype).reshape(shape)


def serialize_tensordict(batch: TensorDict) -> PackedTensorDict:
    """Packs batch size, device and columns as plain containers and bytes, as in verl."""
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
    """Inverts `serialize_tensordict`."""
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


_ALLOWED_NAMES = {
    "builtins": "set frozenset complex bytearray slice range list dict",
    "collections": "OrderedDict",
    "datetime": "datetime date timedelta timezone",
    "decimal": "Decimal",
    "uuid": "UUID",
    "_codecs": "encode",
    "hone.protocol.data_proto": "DataProto",
    "tensordict.tensorclass": "NonTensorData",
    "torch._utils": "_rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter",
    **{
        f"numpy.{core}.{module}": "_reconstruct scalar _frombuffer"
        for core in ("core", "_core")
        for module in ("multiarray", "numeric")
    },
}
"""The names that a pickle may refer to, by module."""


class UnsafeObject(ValueError):
    """A batch contains objects other than plain values, arrays and tensors."""


class _RestrictedUnpickler(pickle._Unpickler):
    """Loads plain values, arrays, tensors and DataProto; raises UnsafeObject for other names.

    The base class is pickle's Python implementation, because a subclass of the C implementation
    cannot check the state that the file gives an object.
    """

    dispatch: ClassVar = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: lambda unpickler: _set_checked_state(unpickler),
    }

    def find_class(self, module: str, name: str) -> Function:
        if (module, name) == ("verl.protocol", "DataProto"):
            module = "hone.protocol.data_proto"
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        is_allowed = name in _ALLOWED_NAMES.get(module, "").split() or module == "numpy.dtypes"
        if module == "numpy":
            value = getattr(np, name, None)
            is_scalar_type = isinstance(value, type) and issubclass(value, np.generic)
            is_allowed = name in ("ndarray", "dtype") or is_scalar_type
        if not is_allowed or "." in name:
            raise UnsafeObject(f"{module}.{name}")
        return super().find_class(module, name)


def _set_checked_state(unpickler: Any) -> None:
    """Sets the state of an object; refuses functions, classes and malformed dtypes."""
    if callable(unpickler.stack[-2]):
        raise UnsafeObject(f"state of {unpickler.stack[-2]!r}")
    pickle._Unpickler.dispatch[pickle.BUILD[0]](unpickler)
    dtype = unpickler.stack[-1]
    if isinstance(dtype, np.dtype):
        # A state can declare object pointers as plain bytes, and numpy would follow the pointers.
        attributes, plain_attributes = (
            (d, d.num, d.itemsize, d.alignment, d.flags) for d in (dtype, np.dtype(dtype.str))
        )
        if attributes != plain_attributes:
            raise UnsafeObject("structured or malformed numpy dtype")


def _load_storage(content: bytes) -> torch.UntypedStorage:
    """Loads a tensor's storage; torch's own function would unpickle any object."""
    return torch.load(io.BytesIO(content), weights_only=True)


def save(data: T, filepath: str | os.PathLike[str]) -> None:
    """Writes `data` to a file, atomically; raises if `load` would reject the content."""
    content = pickle.dumps(data, protocol=5)
    _unpickle(content, filepath)
    target = Path(filepath)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def load(filepath: str | os.PathLike[str], expected_type: type[T]) -> T:
    """Reads a file of `save`; raises, before any code runs, if the file names code outside _ALLOWED_NAMES."""
    data = _unpickle(Path(filepath).read_bytes(), filepath)
    if not isinstance(data, expected_type):
        raise ValueError(
            f"{filepath} contains a {type(data).__name__}, not a {expected_type.__name__}"
        )
    return data


def _unpickle(content: bytes, filepath: str | os.PathLike[str]) -> object:
    try:
        return _RestrictedUnpickler(io.BytesIO(content)).load()
    except UnsafeObject as error:
        raise UnsafeObject(
            f"{filepath} contains a {error}; convert it: a batch in a file may contain only plain "
            "values, arrays and tensors"
        ) from None
