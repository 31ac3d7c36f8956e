"""Loading a user's own class for the data room; the error names the key that asked for it."""

from __future__ import annotations

from hone.data.rows import DataError
from hone.plugins import PluginError, load_extern_object
from hone.plugins import load_object as load_named
from hone.types import Function


def load_object(path: str, name: str | None, key: str) -> Function:
    """Object `name` of a file (`dir/file.py`) or a module (`pkg.mod` or `pkg://pkg.mod`).

    Without a name, the path ends with it: `dir/file.py:Class` or `pkg.mod:Class`.
    """
    if not name and ":" not in path.removeprefix("pkg://").removeprefix("file://"):
        raise DataError(f"{key}: {path} needs the name of the class in it; write {path}:Class")
    try:
        return load_extern_object(path, name) if name else load_named(path)
    except PluginError as error:
        raise DataError(f"{key}: {error}") from error
