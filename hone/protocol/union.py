"""What two batches have in common must be equal before they are united.

Deep equality where NaN equals NaN and structures may contain themselves. Leaves out tolerance:
two columns of one name that differ in the last bit are two columns.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection

from hone.protocol.errors import ProtocolError

T = TypeVar("T")


def union_tensor_dict(first: TensorDict | None, second: TensorDict | None) -> TensorDict | None:
    """The columns of the second added to the first, in place; a column both have must be equal."""
    if first is None or second is None:
        return first if second is None else second
    if first.batch_size != second.batch_size:
        raise ProtocolError(
            f"cannot unite tensors of batch size {tuple(first.batch_size)} with "
            f"{tuple(second.batch_size)}"
        )
    mine, theirs = ({key: side.get(key) for key in side.keys()} for side in (first, second))  # noqa: SIM118
    union_dicts(mine, theirs, "column")
    return first.update({key: value for key, value in theirs.items() if key not in mine})


def union_numpy_dict(
    first: dict[str, np.ndarray], second: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Object columns of both; a column both have must be equal."""
    return union_dicts(first, second, "object column")


def union_dicts(first: dict[str, T], second: dict[str, T], kind: str) -> dict[str, T]:
    """Entries of both; ProtocolError where they disagree."""
    for key in first.keys() & second.keys():
        if not same(first[key], second[key]):
            raise ProtocolError(
                f"cannot unite two batches: their {kind} {key!r} differs; "
                "pop or rename it in one of them first"
            )
    return first | second


def same(a: Any, b: Any, _open: set[tuple[int, int]] | None = None) -> bool:
    """Deep equality where NaN equals NaN and a structure may contain itself."""
    if a is b:
        return True
    opened = _open if _open is not None else set()
    pair = (id(a), id(b))
    if pair in opened:
        return True  # this comparison is already under way further up
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensor(a, b)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return False
    if is_tensor_collection(a) or is_tensor_collection(b):
        if isinstance(a, NonTensorData | NonTensorStack):
            return type(a) is type(b) and same(a.tolist(), b.tolist())
        return is_tensor_collection(a) and is_tensor_collection(b) and same(dict(a), dict(b))
    opened.add(pair)
    try:
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            return _same_array(a, b, opened)
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
            return False
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key], opened) for key in a)
        if isinstance(a, list | tuple) and isinstance(b, list | tuple):
            alike = type(a) is type(b) and len(a) == len(b)
            return alike and all(same(x, y, opened) for x, y in zip(a, b, strict=True))
    finally:
        opened.discard(pair)
    if isinstance(a, float) and isinstance(b, float) and a != a and b != b:
        return True
    return bool(a == b)


def _same_tensor(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype:
        return False
    if a.is_nested or b.is_nested:
        if not (a.is_nested and b.is_nested) or a.size(0) != b.size(0):
            return False
        return all(_same_tensor(x, y) for x, y in zip(a.unbind(), b.unbind(), strict=True))
    if a.shape != b.shape:
        return False
    b = b.to(a.device)
    if a.dtype.is_floating_point or a.dtype.is_complex:
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def _same_array(a: np.ndarray, b: np.ndarray, opened: set[tuple[int, int]]) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype.kind == "f" and b.dtype.kind == "f":
        return bool(np.array_equal(a, b, equal_nan=True))
    if a.dtype != object and b.dtype != object:
        return bool(np.array_equal(a, b))
    return all(same(x, y, opened) for x, y in zip(a.ravel(), b.ravel(), strict=True))
