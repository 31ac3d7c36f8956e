"""Loading a user's own class: from a file or from a module.

The same file gives the same module, so that its classes stay identical when loaded twice.
Leaves out what the class must be able to do: its callers check.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from hone.data.rows import DataError


def load_object(path: str, name: str, key: str) -> Any:
    """Object `name` of a file (`dir/file.py`) or a module (`pkg.mod` or `pkg://pkg.mod`)."""
    module = _load_module(path, key)
    if not hasattr(module, name):
        public = [other for other in vars(module) if not other.startswith("_")]
        raise DataError(f"{key}: {path} has no {name!r}; it has {', '.join(sorted(public))}")
    return getattr(module, name)


def _load_module(path: str, key: str) -> Any:
    dotted = path.removeprefix("pkg://")
    if dotted == path and (path.endswith(".py") or os.sep in path):
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            raise DataError(f"{key}: file {path} does not exist")
        name = f"hone_user_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    try:
        return importlib.import_module(dotted)
    except ModuleNotFoundError as error:
        raise DataError(f"{key}: cannot import {dotted!r}: {error}") from error
