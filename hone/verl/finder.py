"""Resolves verl's module paths by the tables in modules.py, table.py and programs.py.

A finder at the end of `sys.meta_path` finds the modules of these paths; a name is imported on first access.
Another finder, at the start, adds verl's names to the modules of hone that are at the same path as in verl.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from hone.verl.modules import EXTENDED_MODULES, WHOLE_MODULES
from hone.verl.programs import ABSENT_NAMES, ABSENT_PROGRAMS, PROGRAMS
from hone.verl.table import NAMES


@functools.cache
def paths() -> set[str]:
    """Returns all paths of the tables and of their parent packages."""
    table_paths = {*WHOLE_MODULES, *NAMES, *ABSENT_NAMES, *PROGRAMS, *ABSENT_PROGRAMS}
    all_paths = set(table_paths)
    for path in table_paths:
        while "." in path:
            path = path.rpartition(".")[0]
            all_paths.add(path)
    return all_paths


class VerlModule(ModuleType):
    """A module that looks up its names in the tables."""

    def __getattr__(self, name: str) -> Any:
        path = self.__name__
        program_module = PROGRAMS.get(path, "").partition(" ")[0]
        if name in NAMES.get(path, {}):
            value = _resolve(path, name)
        elif name in ABSENT_NAMES.get(path, {}):
            value = _placeholder(path, name)
        elif program_module and not name.startswith("__"):
            value = getattr(importlib.import_module(program_module), name)
        else:
            raise AttributeError(f"module {path!r} has no attribute {name!r}{_names_hint(path)}")
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; a dict that replaces a registry becomes the entries of the registry."""
        if isinstance(value, dict) and name in NAMES.get(self.__name__, {}):
            use_entries = getattr(_resolve(self.__name__, name), "use_entries", None)
            if use_entries is not None:  # the registry is a TableView
                use_entries(value)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Pickles by name, so that functions that refer to the module can be sent to a worker."""
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> Sequence[str]:
        return sorted({*self.__dict__, *NAMES.get(self.__name__, {})})


def _resolve(path: str, name: str) -> Any:
    """Imports the object that the table has for a name of a path."""
    return _load(NAMES[path][name])


def _load(target: str) -> Any:
    """Imports an object, given as "module:name"."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _placeholder(path: str, name: str) -> type:
    """Returns a placeholder class, whose instantiation raises NotImplementedError."""
    message = f"{name}: {ABSENT_NAMES[path][name]}"

    def raise_unsupported(*_: type, **__: type) -> None:
        raise NotImplementedError(message)

    attributes = {
        "__new__": raise_unsupported,
        "__module__": path,
        "__doc__": message,
        "__unsupported__": message,
    }
    return type(name, (), attributes)


def _names_hint(path: str) -> str:
    """Returns `; it has NAMES` for a path whose names are in the table."""
    names: Mapping[str, str] = NAMES.get(path, {})
    return f"; it has {', '.join(sorted(names))}" if names else ""


class VerlLoader(Loader):
    """Creates a `VerlModule`, or imports the real module of a path in `WHOLE_MODULES`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return VerlModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ in WHOLE_MODULES:
            sys.modules[module.__name__] = importlib.import_module(WHOLE_MODULES[module.__name__])
        names = NAMES.get(module.__name__)
        if names:
            module.__dict__["__all__"] = sorted(names)

    def get_code(self, name: str) -> CodeType:
        """Returns the code that `python -m` runs for a program of verl."""
        path = _hone_path(name)
        if path in ABSENT_PROGRAMS:
            source_code = (
                f"import sys\nsys.stderr.write({ABSENT_PROGRAMS[path] + chr(10)!r})\nsys.exit(2)\n"
            )
        elif path in PROGRAMS:
            module, *arguments = PROGRAMS[path].split()
            # sys.argv[0] is None here, because runpy found no file of the module.
            source_code = (
                f"import runpy, sys\nsys.argv[:1] = {[module, *arguments]!r}\n"
                f"runpy.run_module({module!r}, run_name='__main__')\n"
            )
        else:
            raise ImportError(f"{name} is not a program; it only has names to import")
        return compile(source_code, f"<{name}>", "exec")


def _hone_path(path: str) -> str:
    """Maps verl's top-level package `recipe` to `hone.recipe`."""
    return f"hone.{path}" if path.startswith("recipe.") else path


def _spec(fullname: str, hone_path: str) -> ModuleSpec | None:
    """Returns the spec of the module `fullname` for a path of the tables; None for any other path."""
    if hone_path not in paths():
        return None
    is_program = hone_path in PROGRAMS or hone_path in ABSENT_PROGRAMS
    return ModuleSpec(fullname, VerlLoader(), is_package=not is_program)


class VerlFinder(MetaPathFinder):
    """Finds the paths of the tables, as the last finder: real modules have precedence."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return _spec(fullname, fullname)


class RecipeFinder(MetaPathFinder):
    """Finds `recipe.*` as `hone.recipe.*`; only the package `recipe` of a checkout installs it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return _spec(fullname, _hone_path(fullname)) if fullname.startswith("recipe.") else None


class ExtendingLoader(SourceFileLoader):
    """Loads a module of hone and adds verl's names of the same path, which are imported on first access."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        path, targets = module.__name__, EXTENDED_MODULES[module.__name__]

        def get_name(name: str) -> Any:
            if name not in targets:
                raise AttributeError(f"module {path!r} has no attribute {name!r}")
            return _load(targets[name])

        module.__dict__["__getattr__"] = get_name


class ExtendingFinder(MetaPathFinder):
    """Finds the modules of hone to which verl's names are added."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in EXTENDED_MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = ExtendingLoader(spec.loader.name, spec.loader.path)
        return spec


def install_finder() -> None:
    """Adds the finders to `sys.meta_path`; a second call does nothing."""
    if not any(isinstance(finder, VerlFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, ExtendingFinder())
        sys.meta_path.append(VerlFinder())


def install_recipe_finder() -> None:
    """Adds the finder for verl's top-level package `recipe` to `sys.meta_path`."""
    sys.meta_path.append(RecipeFinder())
