"""Names to objects: one table per kind of plug-in, and the ways to point at a user's own.

A table maps a name to "module:object", resolved when asked for, in the process that uses it. A user's
own is "pkg.mod:object", "file.py:object", or what a decorator put in the same table.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Kind = TypeVar("Kind", covariant=True)
"""What every object of a table is: a class, or a function with these arguments."""


NOT_BUILT = "__not_built__"
"""The attribute of a name of verl that is not built: a sentence that says so."""


class PluginError(ValueError):
    """A name, file or object that cannot be found; the message proposes what to write."""


class MissingFile(PluginError, FileNotFoundError):
    """A file that does not exist."""


class MissingObject(PluginError, AttributeError):
    """A module that does not have the object."""


class MissingModule(PluginError, ModuleNotFoundError):
    """A module that is not there."""


class BrokenModule(PluginError, RuntimeError):
    """A file that raises while it is loaded."""


class Table(Generic[Kind]):
    """Names of one kind of plug-in."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self.entries: dict[str, Any] = dict(entries)

    def names(self) -> list[str]:
        return sorted(self.entries)

    def __contains__(self, name: str) -> bool:
        return plain_name(name) in self.entries

    def is_built_in(self, name: str) -> bool:
        """True for a name that points to a place in this package and has not been loaded for it."""
        return isinstance(self.entries.get(plain_name(name)), str)

    def get(self, name: str) -> Kind:
        """The object under a name of the configuration, which may also be an import path."""
        name = plain_name(name)
        if name not in self.entries and ":" in name:
            return load_object(name)
        return self._named(name, '; or your own as "pkg.mod:object" or "file.py:object"')

    def get_registered(self, name: str) -> Kind:
        """The object registered under a name; a name from data goes here, and imports nothing."""
        return self._named(name, "")

    def _named(self, name: str, or_else: str) -> Kind:
        if name in self.entries:
            target = self.entries[name]
            return load_object(target) if isinstance(target, str) else target
        raise PluginError(
            f"unknown {self.kind} {name!r}.{proposal(name, self.entries)} "
            f"Known: {', '.join(self.names())}{or_else}"
        )

    def add(self, name: str, target: T) -> None:
        """Register an object or "module:object"; another one under a taken name is an error."""
        name = plain_name(name)
        taken = self.entries.get(name)
        if isinstance(taken, str) and not isinstance(target, str):
            taken = load_object(taken)
        if taken is not None and not _same(taken, target):
            raise PluginError(
                f"{self.kind} {name!r} is already {_described(taken)}; choose another name"
            )
        self.entries.setdefault(name, target)

    def replace(self, name: str, target: T) -> None:
        """Put an object under a name, taken or not."""
        self.entries[plain_name(name)] = target

    def remove(self, name: str) -> None:
        """Take a name out; KeyError where it is not there."""
        del self.entries[plain_name(name)]

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator form of `add`."""

        def decorate(thing: T) -> T:
            self.add(name, thing)
            return thing

        return decorate


def proposal(name: str, known: Iterable[str]) -> str:
    """` Did you mean …?` where a known name is close, else nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


class TableView(MutableMapping[str, T]):
    """A table read and changed as a dict of names to objects."""

    def __init__(self, table: Table[T]) -> None:
        self._table = table

    def __getitem__(self, name: str) -> T:
        if name not in self._table:
            raise KeyError(name)
        return self._table.get(name)

    def __setitem__(self, name: str, target: T) -> None:
        self._table.replace(name, target)

    def __delitem__(self, name: str) -> None:
        self._table.remove(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table.names())

    def __len__(self) -> int:
        return len(self._table.names())

    def use(self, entries: dict[str, T]) -> None:
        """Let the table hold exactly these entries from now on; later ones are added to this dict."""
        self._table.entries = entries


def plain_name(name: str | Enum) -> str:
    """A name, also where an enum member stands for it, as in verl."""
    return str(name.value) if isinstance(name, Enum) else name


def _described(thing: T) -> str:
    """`Name of file.py` for what a user's file defines, never the name that its module has here."""
    name = getattr(thing, "__qualname__", None)
    module = sys.modules.get(getattr(thing, "__module__", ""))
    file = getattr(module, "__file__", None)
    return f"{name} of {file}" if name and file else f"{thing!r:.80}"


def _same(a: T, b: T) -> bool:
    """Also true for one module imported twice, as a script and by name."""
    if a is b or a == b:
        return True
    where = [(getattr(x, "__module__", None), getattr(x, "__qualname__", None)) for x in (a, b)]
    return where[0] == where[1] and None not in where[0]


def load_object(target: str) -> Any:
    """The object at "module:name", "file.py:name" or "module.name"."""
    path, colon, name = target.rpartition(":")
    if not colon or path == "pkg":
        path, _, name = target.rpartition(".")
    if not path:
        raise PluginError(f"{target!r} names no object; write pkg.mod:object or file.py:object")
    return load_extern_object(path, name)


def load_extern_object(
    module_path: str, object_name: str | None = None, *, class_name: str | None = None
) -> Any:
    """`object_name` (dotted names reach inside) of the module at `module_path`; verl's name."""
    name = object_name or class_name
    if not name:
        raise PluginError(f"name the object to load from {module_path!r}")
    value = load_module(module_path)
    for part in name.split("."):
        if not hasattr(value, part):
            offered = ", ".join(sorted(n for n in vars(value) if not n.startswith("_"))[:12])
            raise MissingObject(f"{module_path!r} has no {name!r}; it has {offered or 'nothing'}")
        value = getattr(value, part)
    if sentence := getattr(value, NOT_BUILT, None):
        raise PluginError(f"{module_path}.{sentence}")
    return value


def load_module(path: str) -> ModuleType:
    """The module at a file path, `pkg://a.b`, `file://…`, or importable name `a.b`."""
    path = path.removeprefix("pkg://")
    file = Path(path.removeprefix("file://")).expanduser()
    if file.suffix != ".py" and not file.is_file():
        return _import(path)
    if not file.is_file():
        raise MissingFile(f"no such file: {path!r} (looked in {Path.cwd()}); check the path")
    return _load_file(file.resolve())


def _import(name: str) -> ModuleType:
    """The module of that name; where verl is not installed, its modules are those of the same path here."""
    target = name
    if name.startswith("verl.") and importlib.util.find_spec("verl") is None:
        target = f"hone.{name.removeprefix('verl.')}"
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        ours = error.name is None or f"{target}.".startswith(f"{error.name}.")
        if ours and target != name:
            raise MissingModule(
                f"{name!r} is not there in hone, and verl is not installed; give a file of your own"
            ) from error
        if ours:
            raise MissingModule(
                f"{name!r} is neither a file (looked in {Path.cwd()}) nor an importable module: "
                f"{error}. Give a path that ends in .py, or a module name."
            ) from error
        raise PluginError(f"{name!r} cannot be imported: {error}; install that") from error
    except Exception as error:  # a user's module may raise anything while it is imported
        raise PluginError(f"{name!r} cannot be imported: {place_and_reason(error)}") from error


def place_and_reason(error: Exception, file: Path | None = None) -> str:
    """`file.py, line 3: ImportError: …`: the innermost line that ran in `file`, or at all."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    if file is None and Path(frames[-1].filename).is_relative_to(Path(__file__).parent):
        return f"{type(error).__name__}: {error}"  # our own line says nothing to the user
    inside = [frame for frame in frames if file is None or frame.filename == str(file)] or frames
    return f"{inside[-1].filename}, line {inside[-1].lineno}: {type(error).__name__}: {error}"


def _load_file(file: Path) -> ModuleType:
    """Loaded once, under a name derived from its path: two files of one name do not clash."""
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
        if isinstance(error, KeyboardInterrupt):
            raise
        if isinstance(error, SystemExit):
            raise PluginError(f"your file ends the program while it is loaded: {file}") from error
        if not isinstance(error, Exception):
            raise
        hint = "; install it" if isinstance(error, ModuleNotFoundError) else ""
        raise BrokenModule(
            f"your file cannot be loaded: {place_and_reason(error, file)}{hint}"
        ) from error
    return module


def import_external_libs(external_libs: str | Iterable[str] | None = None) -> None:
    """Import modules that register plug-ins."""
    names = [external_libs] if isinstance(external_libs, str) else external_libs or ()
    for name in names:
        importlib.import_module(name)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


is_vllm_available = functools.partial(_installed, "vllm")
is_sglang_available = functools.partial(_installed, "sglang")
is_megatron_core_available = functools.partial(_installed, "megatron")
