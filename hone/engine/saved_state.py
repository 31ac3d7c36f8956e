"""Reads torch's distributed checkpoints without running code from them.

Torch stores the metadata of a checkpoint (`.metadata`) and its plain values as pickles, which can call any
function. Here the metadata may use only torch's metadata classes, and values are loaded as data.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from hone.types import Function

TABLE = ".metadata"
_DESCRIPTIONS = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
    )
}
_VALUES: dict[tuple[str, str], Function] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    # The path of the checkpoint is kept as text.
    ("pathlib", "PosixPath"): lambda *parts: "/".join(map(str, parts)),
    ("pathlib", "WindowsPath"): lambda *parts: "/".join(map(str, parts)),
    ("pathlib._local", "PosixPath"): lambda *parts: "/".join(map(str, parts)),
    ("collections", "OrderedDict"): dict,
}


State: TypeAlias = dict[str, Any]
"""Engine state by section, in the form of torch.distributed.checkpoint."""


class ForeignState(ValueError):
    """A checkpoint holds more than tensors and plain values and is not read."""


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Function | torch.dtype:
        if (module, name) in _DESCRIPTIONS:
            return _DESCRIPTIONS[module, name]
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise ForeignState(f"it names {module}.{name}")

    def persistent_load(self, pid: str) -> NoReturn:
        raise ForeignState("it refers to other objects")


def read_table(folder: Path) -> Metadata:
    """Reads the metadata of a checkpoint."""
    file = folder / TABLE
    try:
        table: Metadata = _TableUnpickler(io.BytesIO(file.read_bytes())).load()
        _check(table)
    except OSError:
        raise
    except Exception as error:  # a malformed pickle can raise any exception
        raise _foreign(file, error) from error
    return table


def _check(table: Metadata) -> None:
    """Raises unless the metadata has torch's structure and refers only to files in the folder."""
    if not isinstance(table, Metadata) or not isinstance(table.state_dict_metadata, dict):
        raise ForeignState("it is no table of a checkpoint")
    kinds = (metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)
    if not all(isinstance(entry, kinds) for entry in table.state_dict_metadata.values()):
        raise ForeignState("it describes something else than tensors and values")
    if not isinstance(table.storage_data, dict):
        raise ForeignState("it does not say where the values lie")
    for place in table.storage_data.values():
        if not isinstance(place, filesystem._StorageInfo) or place.transform_descriptors:
            raise ForeignState("it names a way of reading that hone does not use")
        name = str(place.relative_path)
        if name != Path(name).name:
            raise ForeignState(f"it names the file {name!r} outside of the folder")


class DataReader(filesystem.FileSystemReader):
    """Reads the metadata with `read_table`; torch already loads tensors as data."""

    def read_metadata(self, *args: int, **kwargs: int) -> Metadata:
        table = read_table(Path(self.path))
        table.storage_meta = table.storage_meta or metadata.StorageMeta()
        table.storage_meta.load_id = self.load_id
        return table


class DataPlanner(DefaultLoadPlanner):
    """Loads plain values (numbers, text, lists) as data; torch's own planner would unpickle them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()
        torch.save(torch.load(value, map_location="cpu", weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


@contextmanager
def alone_without_warning() -> Iterator[None]:
    """Suppresses torch's warning about saving or loading in a single process, which is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
        yield


def load_state(state: State, folder: Path) -> None:
    """Loads a checkpoint into a state, in place."""
    read_table(folder)  # checked first, because torch would wrap the error twice
    try:
        with alone_without_warning():
            load(state, storage_reader=DataReader(str(folder)), planner=DataPlanner())
    except CheckpointException as error:
        for failure in error.failures.values():
            cause = failure[0]
            if isinstance(cause, (ForeignState, pickle.UnpicklingError)):
                raise _foreign(folder, cause) from None
        raise


def _foreign(place: Path, error: BaseException) -> ForeignState:
    first, _, _ = str(error).strip().partition("\n")
    return ForeignState(
        f"{place} was not written by hone ({first or type(error).__name__}); nothing of it was run. Use "
        "a checkpoint from a source you know, or restore it from a copy"
    )
