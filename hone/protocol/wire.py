"""How a DataProto crosses a process: tensors travel as numpy views, never as torch storages.

Pickle protocol 5 then moves them out of band without a copy. Leaves out compression and devices:
what arrives lies on the CPU.
"""

from __future__ import annotations

import io
from typing import Any, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from hone.protocol.errors import ProtocolError
from hone.protocol.packed import PackedTensorDict, deserialize_tensordict
from hone.protocol.rows import object_array
from hone.types import JsonValue, Row

Encoded: TypeAlias = tuple[str, Any, Any]
"""Kind, payload, and what the kind needs besides: numpy arrays, and what is encoded inside."""

# numpy has no such numbers: the bits travel under an integer type of the same width.
_BITS_BY_WIDTH = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_NUMPY_KNOWS = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)


def encode_tensor(tensor: torch.Tensor) -> Encoded:
    """One tensor as ("dense", array, dtype name) or ("jagged", values, offsets)."""
    if tensor.is_nested:
        jagged = tensor if tensor.layout == torch.jagged else _as_jagged(tensor)
        offsets, ragged = jagged.offsets(), getattr(jagged, "_ragged_idx", 1)  # type: ignore[attr-defined]
        return "jagged", encode_tensor(jagged.values()), (encode_tensor(offsets), ragged)
    plain = tensor.detach()
    if plain.device.type != "cpu":
        plain = plain.cpu()
    plain = plain.resolve_conj().resolve_neg().contiguous()
    name = str(plain.dtype).removeprefix("torch.")
    if plain.dtype not in _NUMPY_KNOWS:
        bits = _BITS_BY_WIDTH[plain.element_size()]
        plain = plain.reshape(-1).view(bits).reshape(plain.shape)
    return "dense", plain.numpy(), name


def decode_tensor(kind: str, payload: Any, extra: Any) -> torch.Tensor:
    """The tensor that `encode_tensor` was given, sharing memory with the array where it may."""
    if kind == "jagged":
        values, offsets = decode_tensor(*payload), decode_tensor(*extra[0])
        return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=extra[1])
    array = payload
    if not array.flags.writeable:
        # Read-only memory is shared with other ranks (Ray's object store): an in-place operation
        # on a view of it would change their data.
        array = array.copy()
    tensor = torch.from_numpy(array)
    dtype = getattr(torch, extra)
    if tensor.dtype != dtype:
        tensor = tensor.reshape(-1).view(dtype).reshape(array.shape)
    return tensor


def encode_tensordict(batch: TensorDict | None) -> Row | None:
    """A TensorDict as plain containers and numpy arrays."""
    if batch is None:
        return None
    entries: dict[str, Encoded] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            entries[key] = encode_tensor(value)
        elif isinstance(value, TensorDict):
            entries[key] = ("tensordict", encode_tensordict(value), None)
        else:
            entries[key] = ("object", value, None)
    return {"batch_size": tuple(batch.batch_size), "entries": entries}


def decode_tensordict(state: Row | None) -> TensorDict | None:
    """The TensorDict that `encode_tensordict` was given, on the CPU."""
    if state is None:
        return None
    source: Row = {}
    for key, (kind, payload, extra) in state["entries"].items():
        if kind == "tensordict":
            source[key] = decode_tensordict(payload)
        elif kind == "object":
            source[key] = payload
        else:
            source[key] = decode_tensor(kind, payload, extra)
    return TensorDict(source, batch_size=state["batch_size"])


def decode_verl_tensors(state: bytes | PackedTensorDict | None) -> TensorDict | None:
    """The tensors of a DataProto that verl pickled; no other code is loaded with them."""
    if isinstance(state, bytes):
        loaded: TensorDict | None = torch.load(
            io.BytesIO(state), weights_only=True, map_location="cpu"
        )
        return loaded
    return None if state is None else deserialize_tensordict(state)


def split_tensordict(
    source: TensorDict,
) -> tuple[Row, dict[str, np.ndarray], Row]:
    """Tensors, object columns (from stacks) and facts (from plain data) of one TensorDict."""
    tensors: Row = {}
    arrays: dict[str, np.ndarray] = {}
    facts: Row = {}
    for key in source.keys():  # noqa: SIM118
        value = source.get(key)
        if isinstance(value, NonTensorStack):
            arrays[key] = _column_of(value.tolist())
        elif isinstance(value, NonTensorData):
            facts[key] = value.data
        else:
            tensors[key] = value
    return tensors, arrays, facts


def join_tensordict(
    batch: TensorDict | None, arrays: dict[str, np.ndarray], facts: Row, rows: int
) -> TensorDict:
    """The inverse of `split_tensordict`."""
    twice = sorted(arrays.keys() & facts.keys())
    if twice:
        raise ProtocolError(f"{twice} are both object columns and meta_info; rename one of each")
    size = batch.batch_size if batch is not None else [rows]
    result = TensorDict(dict(batch.items()) if batch is not None else {}, batch_size=size)
    for key, array in arrays.items():
        result.set(key, NonTensorStack(*[NonTensorData(value) for value in array]))
    for key, value in facts.items():
        result.set(key, NonTensorData(value, batch_size=size))
    return result


def _column_of(values: list[JsonValue | np.ndarray]) -> np.ndarray:
    """The object column; rows that are object arrays of one shape were rows of a wider column."""
    arrays = [v for v in values if isinstance(v, np.ndarray) and v.dtype == object]
    if arrays and len(arrays) == len(values) and len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    return object_array(values)


def _as_jagged(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(list(tensor.unbind()), layout=torch.jagged)
