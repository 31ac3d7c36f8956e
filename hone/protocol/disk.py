"""A DataProto in a file, written whole or not at all.

The file is a pickle of the state wire.py gives, read with plain values, arrays and tensors alone: a file
cannot name any other code to run.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from hone.types import Function

if TYPE_CHECKING:
    from torch import UntypedStorage

T = TypeVar("T")

_BUILTINS = frozenset(
    {"set", "frozenset", "complex", "bytearray", "slice", "range", "list", "dict"}
)
_PLAIN = {
    ("collections", "OrderedDict"),
    ("datetime", "datetime"),
    ("datetime", "date"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("decimal", "Decimal"),
    ("uuid", "UUID"),
    ("_codecs", "encode"),
    ("hone.protocol.data_proto", "DataProto"),
    ("tensordict.tensorclass", "NonTensorData"),
}
_NUMPY_MODULES = frozenset(
    {"numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric"}
)
_NUMPY_MAKERS = frozenset({"_reconstruct", "scalar", "_frombuffer"})
_TORCH_MAKERS = frozenset({"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"})


class ForeignObject(ValueError):
    """A batch that holds something else than plain values, arrays and tensors."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Function:
        if (module, name) == ("verl.protocol", "DataProto"):
            module = "hone.protocol.data_proto"
        plain = (
            (module == "builtins" and name in _BUILTINS)
            or (module, name) in _PLAIN
            or (module in _NUMPY_MODULES and name in _NUMPY_MAKERS)
            or (module == "numpy" and _is_numpy_type(name))
            or module == "numpy.dtypes"
            or (module == "torch._utils" and name in _TORCH_MAKERS)
        )
        if plain and "." not in name:
            return super().find_class(module, name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_storage
        raise ForeignObject(f"{module}.{name}")


def _is_numpy_type(name: str) -> bool:
    found = getattr(np, name, None)
    return name in ("ndarray", "dtype") or (
        isinstance(found, type) and issubclass(found, np.generic)
    )


def _load_storage(content: bytes) -> UntypedStorage:
    """A tensor's memory, as torch pickles it; torch's own function would unpickle anything."""
    import torch

    return torch.load(io.BytesIO(content), weights_only=True)


def save(data: T, filepath: str | os.PathLike[str]) -> None:
    """Write to a file; a reader never sees half of it. What `load` would refuse is refused here."""
    content = pickle.dumps(data, protocol=5)
    _read(content, filepath)
    target = Path(filepath)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def load(filepath: str | os.PathLike[str], kind: type[T]) -> T:
    """Read what `save` wrote; a file that names other code is refused before any of it runs."""
    data = _read(Path(filepath).read_bytes(), filepath)
    if not isinstance(data, kind):
        raise ValueError(f"{filepath} holds a {type(data).__name__}, not a {kind.__name__}")
    return data


def _read(content: bytes, filepath: str | os.PathLike[str]) -> object:
    try:
        return _PlainUnpickler(io.BytesIO(content)).load()
    except ForeignObject as error:
        raise ForeignObject(
            f"{filepath} holds a {error}, and a batch in a file holds plain values, arrays and tensors "
            "only; turn it into those first"
        ) from None
