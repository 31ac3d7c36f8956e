"""Resolves verl's module paths by the tables in `hone.compat_table` and `hone.compat_programs`.

A finder at the end of `sys.meta_path` handles only paths of these tables that are not real modules;
names are loaded on first access.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from hone.compat_programs import ABSENT_NAMES, ABSENT_PROGRAMS, PROGRAMS
from hone.compat_table import NAMES, WHOLE_MODULES


def paths() -> set[str]:
    """Returns every path of the tables and its parent packages."""
    listed = {*WHOLE_MODULES, *NAMES, *ABSENT_NAMES, *PROGRAMS, *ABSENT_PROGRAMS}
    return listed | {path[:i] for path in listed for i, letter in enumerate(path) if letter == "."}


class VerlModule(ModuleType):
    """A module that looks up its names in the tables."""

    def __getattr__(self, name: str) -> Any:
        path = self.__name__
        whole = PROGRAMS.get(path, "").partition(" ")[0]
        if name in NAMES.get(path, {}):
            value = _listed(path, name)
        elif name in ABSENT_NAMES.get(path, {}):
            value = _absent(path, name)
        elif whole and not name.startswith("__"):
            value = getattr(importlib.import_module(whole), name)
        else:
            raise AttributeError(f"module {path!r} has no attribute {name!r}{_known(path)}")
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Replaces the entries of a registry if a dict is assigned to it."""
        if isinstance(value, dict) and name in NAMES.get(self.__name__, {}):
            use = getattr(_listed(self.__name__, name), "use", None)
            if use is not None:  # a TableView
                use(value)
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Pickles by name, so that functions that refer to the module can be sent to a worker."""
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> Sequence[str]:
        return sorted({*self.__dict__, *NAMES.get(self.__name__, {})})


def _listed(path: str, name: str) -> Any:
    module, _, attribute = NAMES[path][name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def _absent(path: str, name: str) -> type:
    """Returns a placeholder class; creating an instance raises an error that explains what is not built."""
    sentence = f"{name}: {ABSENT_NAMES[path][name]}"

    def refuse(*_: type, **__: type) -> None:
        raise NotImplementedError(sentence)

    facts = {"__new__": refuse, "__module__": path, "__doc__": sentence, "__not_built__": sentence}
    return type(name, (), facts)


def _known(path: str) -> str:
    names: Mapping[str, str] = NAMES.get(path, {})
    return f"; it has {', '.join(sorted(names))}" if names else ""


class VerlLoader(Loader):
    """Creates a `VerlModule`; a path of `WHOLE_MODULES` is the module itself, so that patches apply to it."""

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
        path = _inside(name)
        if path in ABSENT_PROGRAMS:
            text = (
                f"import sys\nsys.stderr.write({ABSENT_PROGRAMS[path] + chr(10)!r})\nsys.exit(2)\n"
            )
        elif path in PROGRAMS:
            module, *words = PROGRAMS[path].split()
            text = (
                f"import runpy, sys\nsys.argv[1:1] = {words!r}\n"
                f"runpy.run_module({module!r}, run_name='__main__')\n"
            )
        else:
            raise ImportError(f"{name} is no program; it only holds names to import")
        return compile(text, f"<{name}>", "exec")


def _inside(path: str) -> str:
    """Maps verl's top-level package `recipe` to `hone.recipe`."""
    return f"hone.{path}" if path.startswith("recipe.") else path


class VerlFinder(MetaPathFinder):
    """Finds the paths of the tables; as the last finder, it is not called for real modules."""

    def __init__(self) -> None:
        self._paths = paths()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        inside = _inside(fullname)
        if inside not in self._paths:
            return None
        is_program = inside in PROGRAMS or inside in ABSENT_PROGRAMS
        return ModuleSpec(fullname, VerlLoader(), is_package=not is_program)


def install() -> None:
    """Installs the finder for verl's paths; a second call does nothing."""
    if not any(isinstance(finder, VerlFinder) for finder in sys.meta_path):
        sys.meta_path.append(VerlFinder())
