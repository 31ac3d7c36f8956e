"""Maps plug-in names to objects, with one table per kind of plug-in.

A table maps a name to "module:object", which is imported on first use. A user gives "pkg.mod:object" or
"file.py:object", or registers an object by a decorator.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from enum import Enum
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Generic, TypeVar

from hone.errors import UserError
from hone.suggestions import suggestion
from hone.types import Function

T = TypeVar("T")
Plugin = TypeVar("Plugin", covariant=True)
"""The type of a table's plug-ins: a class, or a function signature."""
UNSUPPORTED_ATTRIBUTE = "__unsupported__"
"""The attribute of a placeholder that has its error message. A placeholder stands for a name of verl
that hone does not support."""


class PluginError(UserError, ValueError):
    """A name, file or object was not found; the message suggests a correction."""


class MissingFile(PluginError, FileNotFoundError):
    """A file does not exist."""


class MissingObject(PluginError, AttributeError):
    """A module does not have the object."""


class MissingModule(PluginError, ModuleNotFoundError):
    """A module was not found."""


class BrokenModule(PluginError, RuntimeError):
    """A file raised an exception while it was loaded."""


class Table(Generic[Plugin]):
    """The registered names of one kind of plug-in."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self.entries: dict[str, Any] = dict(entries)

    def names(self) -> list[str]:
        return sorted(self.entries)

    def __contains__(self, name: str) -> bool:
        return plain_name(name) in self.entries

    def is_built_in(self, name: str) -> bool:
        """Whether hone provides the plug-in: its entry is an import path, and a user registers an object."""
        return isinstance(self.entries.get(plain_name(name)), str)

    def get(self, name: str) -> Plugin:
        """Returns the object of a name in the table, or of an import path."""
        name = plain_name(name)
        if name not in self.entries and ":" in name:
            return load_object(name)
        return self.get_registered(name, '; or your own as "pkg.mod:object" or "file.py:object"')

    def get_registered(self, name: str, hint: str = "") -> Plugin:
        """Like `get`, but refuses import paths, because a name in a data file must not import code.

        `hint` is the end of the message for an unknown name.
        """
        if name not in self.entries:
            raise PluginError(
                f"unknown {self.kind} {name!r}.{suggestion(name, self.entries)} "
                f"Known: {', '.join(self.names())}{hint}"
            )
        target = self.entries[name]
        return load_object(target) if isinstance(target, str) else target

    def add(self, name: str, target: T) -> None:
        """Registers an object or "module:object"; raises if the name already has another object."""
        name = plain_name(name)
        old_target = self.entries.get(name)
        if isinstance(old_target, str) and not isinstance(target, str):
            old_target = load_object(old_target)
        if old_target is not None and not _is_same(old_target, target):
            raise PluginError(
                f"{self.kind} {name!r} is already {_describe(old_target)}; choose another name"
            )
        self.entries.setdefault(name, target)

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator form of `add`."""

        def decorate(plugin: T) -> T:
            self.add(name, plugin)
            return plugin

        return decorate


class TableView(MutableMapping[str, T]):
    """A mutable mapping from name to object; its data are the entries of a table."""

    def __init__(self, table: Table[T]) -> None:
        self._table = table

    def __getitem__(self, name: str) -> T:
        if name not in self._table:
            raise KeyError(name)
        return self._table.get(name)

    def __setitem__(self, name: str, target: T) -> None:
        self._table.entries[plain_name(name)] = target

    def __delitem__(self, name: str) -> None:
        del self._table.entries[plain_name(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.names())

    def __len__(self) -> int:
        return len(self._table.entries)

    def use_entries(self, entries: dict[str, T]) -> None:
        """Replaces the table's entries by the dict `entries`; later registrations are written to it."""
        self._table.entries = entries


def plain_name(name: str | Enum) -> str:
    """Returns the name as a string; verl also uses enum members as names."""
    return str(name.value) if isinstance(name, Enum) else name


def _describe(plugin: T) -> str:
    """Returns `NAME of FILE`, because the module name of a user file is generated."""
    name = getattr(plugin, "__qualname__", None)
    module = sys.modules.get(getattr(plugin, "__module__", ""))
    file = getattr(module, "__file__", None)
    return f"{name} of {file}" if name and file else f"{plugin!r:.80}"


def _is_same(first: T, second: T) -> bool:
    """Whether two objects are equal, or are one object of a module that was imported twice."""
    first_name, second_name = (
        (getattr(plugin, "__module__", None), getattr(plugin, "__qualname__", None))
        for plugin in (first, second)
    )
    return (
        first is second or first == second or (first_name == second_name and None not in first_name)
    )


def load_object(target: str) -> Any:
    """Loads the object at "module:name", "file.py:name" or "module.name"."""
    path, colon, name = target.rpartition(":")
    if not colon or path == "pkg":  # in pkg://a.b.c, the colon is part of the scheme
        path, _, name = target.rpartition(".")
    if not path:
        raise PluginError(f"{target!r} has no object name; write pkg.mod:object or file.py:object")
    return load_extern_object(path, name)


def load_extern_object(
    module_path: str, object_name: str | None = None, *, class_name: str | None = None
) -> Any:
    """Loads `object_name`, which may be dotted, from a module (named as in verl)."""
    name = object_name or class_name
    if not name:
        raise PluginError(f"no object name for {module_path!r}; name the object to load")
    value = load_module(module_path)
    for part in name.split("."):
        if not hasattr(value, part):
            public_names = sorted(n for n in vars(value) if not n.startswith("_"))[:12]
            listing = ", ".join(public_names) or "nothing"
            raise MissingObject(f"{module_path!r} has no {name!r}; it has {listing}")
        value = getattr(value, part)
    if message := getattr(value, UNSUPPORTED_ATTRIBUTE, None):
        raise PluginError(f"{module_path}.{message}")
    return value


def load_module(path: str) -> ModuleType:
    """Loads a module, given as a file path, `file://…`, `pkg://a.b` or an importable name `a.b`."""
    path = path.removeprefix("pkg://")
    file = Path(path.removeprefix("file://")).expanduser()
    if file.suffix != ".py" and not file.is_file():
        return _import(path)
    if not file.is_file():
        hint = "" if file.is_absolute() else f" (looked in {Path.cwd()})"
        raise MissingFile(f"no such file: {str(file)!r}{hint}; check the path")
    return _load_file(file.resolve())


def _has_package(package: str) -> bool:
    """Returns whether a package is installed; a folder without `__init__.py` is not a package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _import(name: str) -> ModuleType:
    """Imports a module; if verl is not installed, `verl.x` is imported as `hone.x`."""
    target = name
    if name.startswith("verl.") and not _has_package("verl"):
        target = f"hone.{name.removeprefix('verl.')}"
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name is not None and not f"{target}.".startswith(f"{error.name}."):
            raise PluginError(f"{name!r} cannot be imported: {error}; install it") from error
        if target != name:
            raise MissingModule(
                f"hone has no {name!r}, and verl is not installed; give a file of your own"
            ) from error
        raise MissingModule(
            f"{name!r} is neither a file (looked in {Path.cwd()}) nor an importable module: "
            f"{error}. Give a path that ends in .py, or a module name."
        ) from error
    except Exception as error:  # a user module may raise any exception on import
        raise PluginError(
            f"{name!r} cannot be imported: {describe_error_with_location(error)}"
        ) from error


def describe_error_with_location(error: Exception, file: Path | None = None) -> str:
    """Returns `file.py, line 3: ImportError: …`, with the line of the innermost frame.

    With `file`, the frame is the innermost frame in this file, if there is one.
    """
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    if file is None and Path(frames[-1].filename).is_relative_to(Path(__file__).parent):
        return f"{type(error).__name__}: {error}"  # a line of this package does not help the user
    frames_in_file = [frame for frame in frames if file is None or frame.filename == str(file)]
    frame = (frames_in_file or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}: {type(error).__name__}: {error}"


def _load_file(file: Path) -> ModuleType:
    """Loads a file once; the module name contains a hash of its path."""
    name = f"hone_extern_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PluginError(f"{file} is not a Python file; give a path that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, SystemExit):
            raise PluginError(f"your file exits the program while it is loaded: {file}") from error
        if not isinstance(error, Exception):
            raise
        hint = "; install it" if isinstance(error, ModuleNotFoundError) else ""
        raise BrokenModule(
            f"your file cannot be loaded: {describe_error_with_location(error, file)}{hint}"
        ) from error
    return module


def unwrap_function(function: Function) -> Function:
    """Returns the function inside `partial` and `functools.wraps`."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        else:
            return function


def definition_location(function: Function) -> str | None:
    """Returns `FILE:LINE` of the definition of a function, or None for a function in C."""
    code = code_of(function)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def code_of(function: Function) -> CodeType | None:
    """Returns the code of a function or of an object's `__call__`; None if it is written in C."""
    function = unwrap_function(function)
    code = getattr(function, "__code__", None)
    if code is None and callable(function):
        code = getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def needed_columns(function: Function) -> tuple[str, ...]:
    """Returns the columns that a user's function lists in its attribute `needs`."""
    needs = getattr(function, "needs", ())
    return (needs,) if isinstance(needs, str) else tuple(needs)


def check_parameters(kind: str, function: Function, names: Sequence[str]) -> None:
    """Raises PluginError unless a user's function can be called with keyword arguments of these names,
    and with the columns that it needs.

    Called by position, a function whose parameters have other names would get the wrong tensors.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # not a function, or a builtin without a signature; it fails in the first step
    parameters = signature.parameters.values()
    known_names = {*names, *needed_columns(function)}
    takes_any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown_names = [
        p.name for p in named if p.name not in known_names or p.kind is p.POSITIONAL_ONLY
    ]
    takes_none = not takes_any_name and len(unknown_names) == len(named)
    required_names = {p.name for p in named if p.default is p.empty}
    wrong_names = [name for name in unknown_names if takes_none or name in required_names]
    if not takes_any_name:
        wrong_names += [f"*{p.name}" for p in parameters if p.kind is p.VAR_POSITIONAL]
    if wrong_names:
        name = getattr(function, "__name__", type(function).__name__)
        location = definition_location(function)
        raise PluginError(
            f"{f'{location}: ' if location else ''}the {kind} {name}{signature} takes "
            f"{', '.join(wrong_names)}, but its arguments are passed by name: {', '.join(names)}; a column "
            f"of the batch is passed if the attribute `needs` of {name} lists it"
        )


def import_external_libs(external_libs: str | Iterable[str] | None = None) -> None:
    """Imports modules that register plug-ins."""
    names = [external_libs] if isinstance(external_libs, str) else external_libs or ()
    for name in names:
        importlib.import_module(name)
