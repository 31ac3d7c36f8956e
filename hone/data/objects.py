"""Loading a user's own class for the data room; the error names the key that asked for it."""

from __future__ import annotations

from typing import Any

from hone.data.rows import DataError
from hone.plugins import PluginError, load_extern_object


def load_object(path: str, name: str, key: str) -> Any:
    """Object `name` of a file (`dir/file.py`) or a module (`pkg.mod` or `pkg://pkg.mod`)."""
    try:
        return load_extern_object(path, name)
    except PluginError as error:
        raise DataError(f"{key}: {error}") from error
