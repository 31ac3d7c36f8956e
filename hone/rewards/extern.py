"""Loading a user's object by file, by `pkg://module`, or by module name.

A file is loaded once, under a name derived from its path, so that two files of one name do not
clash and classes keep their identity. Nothing is added to `sys.path`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class ExternError(ImportError):
    """A user's file, module or object could not be loaded."""


def load_module(path: str) -> ModuleType:
    """The module at a file path, `pkg://a.b`, `file://…`, or importable name `a.b`."""
    if path.startswith("pkg://"):
        return importlib.import_module(path.removeprefix("pkg://"))
    file = Path(path.removeprefix("file://")).expanduser()
    if file.suffix != ".py" and not file.is_file():
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            raise ExternError(
                f"{path!r} is neither a file (looked in {Path.cwd()}) nor an importable module: "
                f"{error}. Give a path that ends in .py, 'pkg://module', or a module name."
            ) from error
    if not file.is_file():
        raise ExternError(f"no such file: {path!r} (looked in {Path.cwd()}). Check the path.")
    return _load_file(file.resolve())


def _load_file(file: Path) -> ModuleType:
    name = f"hone_extern_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ExternError(f"{file} is not a Python file; give a path that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_extern_object(
    module_path: str, object_name: str | None = None, *, class_name: str | None = None
) -> Any:
    """`object_name` (dotted names reach inside) of the module at `module_path`."""
    name = object_name or class_name
    if not name:
        raise ExternError(f"name the object to load from {module_path!r}")
    found: Any = load_module(module_path)
    for part in name.split("."):
        if not hasattr(found, part):
            offered = ", ".join(sorted(n for n in vars(found) if not n.startswith("_"))[:12])
            raise ExternError(f"{module_path!r} has no {name!r}; it has {offered or 'nothing'}")
        found = getattr(found, part)
    return found


def load_object(target: str) -> Any:
    """The object that `"module:name"` or `"file.py:name"` points to."""
    path, _, name = target.rpartition(":")
    return load_extern_object(path, name)
