"""Reads torch's distributed checkpoints without running code from them.

Torch stores the metadata of a checkpoint (`.metadata`) and its plain values as pickles, which can call any
function. Here the metadata may use only torch's metadata classes, and values are loaded with weights_only.
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

from hone.errors import UserError
from hone.types import Function

METADATA_FILE = ".metadata"
_METADATA_CLASSES = {
    (cls.__module__, cls.__qualname__): cls
    for cls in (
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


def _path_text(*parts: str) -> str:
    return "/".join(map(str, parts))


_CONSTRUCTORS: dict[tuple[str, str], Function] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    # Paths are unpickled as text.
    ("pathlib", "PosixPath"): _path_text,
    ("pathlib._local", "PosixPath"): _path_text,
    ("pathlib", "WindowsPath"): _path_text,
    ("collections", "OrderedDict"): dict,
}


State: TypeAlias = dict[str, Any]
"""Engine state by section, in the form of torch.distributed.checkpoint."""


class UnsafeCheckpoint(UserError, ValueError):
    """A checkpoint contains more than tensors and plain values, so it is not read."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only the classes of torch's checkpoint metadata, and dtypes."""

    def find_class(self, module: str, name: str) -> Function | torch.dtype:
        if (module, name) in _METADATA_CLASSES:
            return _METADATA_CLASSES[module, name]
        if (module, name) in _CONSTRUCTORS:
            return _CONSTRUCTORS[module, name]
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise UnsafeCheckpoint(f"it refers to {module}.{name}")

    def persistent_load(self, pid: str) -> NoReturn:
        raise UnsafeCheckpoint("it refers to objects outside of the file")


def read_metadata(folder: Path) -> Metadata:
    """Reads the metadata of a checkpoint."""
    file = folder / METADATA_FILE
    try:
        content: Metadata = _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
        _check_metadata(content)
    except OSError:
        raise
    except Exception as error:  # a malformed pickle can raise any exception
        raise _unsafe_checkpoint_error(file, error) from error
    return content


def _check_metadata(content: Metadata) -> None:
    """Raises unless the metadata has torch's structure and refers only to files in the folder."""
    if not isinstance(content, Metadata) or not isinstance(content.state_dict_metadata, dict):
        raise UnsafeCheckpoint("it is not the metadata of a checkpoint")
    entry_types = (metadata.TensorStorageMetadata, metadata.BytesStorageMetadata)
    if not all(isinstance(entry, entry_types) for entry in content.state_dict_metadata.values()):
        raise UnsafeCheckpoint("it describes entries other than tensors and values")
    if not isinstance(content.storage_data, dict):
        raise UnsafeCheckpoint("it does not name the files of its values")
    for storage in content.storage_data.values():
        if not isinstance(storage, filesystem._StorageInfo) or storage.transform_descriptors:
            raise UnsafeCheckpoint("its files have a format that hone does not read")
        name = str(storage.relative_path)
        if name != Path(name).name:
            raise UnsafeCheckpoint(f"it names the file {name!r} outside of the folder")


class SafeReader(filesystem.FileSystemReader):
    """Reads the metadata with hone's `read_metadata`; torch itself loads tensors without pickle."""

    def read_metadata(self, *args: int, **kwargs: int) -> Metadata:
        content = read_metadata(Path(self.path))
        content.storage_meta = content.storage_meta or metadata.StorageMeta()
        content.storage_meta.load_id = self.load_id
        return content


class SafePlanner(DefaultLoadPlanner):
    """Loads plain values (numbers, text, lists) with weights_only; torch's planner unpickles any object."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain_value = torch.load(value, map_location="cpu", weights_only=True)
        checked_bytes = io.BytesIO()
        torch.save(plain_value, checked_bytes)
        checked_bytes.seek(0)
        super().load_bytes(read_item, checked_bytes)


@contextmanager
def no_single_process_warning() -> Iterator[None]:
    """Suppresses torch's warning about saving or loading in a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
        yield


def load_state(state: State, folder: Path) -> None:
    """Loads a checkpoint into the entries of `state`, in place."""
    # `load` reads the metadata again (SafeReader); there, torch would wrap an error in its own exception.
    read_metadata(folder)
    try:
        with no_single_process_warning():
            load(state, storage_reader=SafeReader(str(folder)), planner=SafePlanner())
    except CheckpointException as error:
        for failure in error.failures.values():
            cause = failure[0]
            if isinstance(cause, (UnsafeCheckpoint, pickle.UnpicklingError)):
                raise _unsafe_checkpoint_error(folder, cause) from None
        raise


def _unsafe_checkpoint_error(path: Path, error: BaseException) -> UnsafeCheckpoint:
    reason, _, _ = str(error).strip().partition("\n")
    return UnsafeCheckpoint(
        f"{path} was not written by hone ({reason or type(error).__name__}); nothing of it was run. Use a "
        "checkpoint from a source you know, or restore it from a copy"
    )
