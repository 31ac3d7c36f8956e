"""Records which dotted keys of a config a running program reads.

Reads by `hone.config` itself (checks, printing), `dataclasses`, `copy` and `pickle` do not count. If a
program reads a property of a block, the keys that the property reads count. Reads by `vars(block)` are not
recorded.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import hone.config
from hone.config import block
from hone.config.keys import block_type, hints
from hone.config.trees import TREES

CONFIG_ROOM = str(Path(hone.config.__file__).parent)
COPYING = ("dataclasses.py", "copy.py", "pickle.py", "cloudpickle.py", "reprlib.py")
COPYING += ("_collections_abc.py",)  # part of the interpreter, "<frozen …>", from Python 3.11 on
LOOKUPS = [f.__code__ for f in (block.setting, block.config_value, block._lookup)]
SELF = __file__


def schema_classes() -> dict[type, set[str]]:
    """Returns every class of the trees, with its field names."""
    classes: dict[type, set[str]] = {}
    waiting = [tree.root for tree in TREES.values()]
    while waiting:
        cls = waiting.pop()
        if cls in classes:
            continue
        classes[cls] = {field.name for field in dataclasses.fields(cls)}
        waiting += [inner for inner in map(block_type, hints(cls).values()) if inner is not None]
    return classes


class Recorder:
    """Records the dotted keys that are read, by tree, and where each was read first."""

    def __init__(self) -> None:
        self.read: dict[str, dict[str, str]] = {name: {} for name in TREES}
        self._roots = {tree.root: name for name, tree in TREES.items()}
        self._paths: dict[int, tuple[str, str, Any]] = {}

    def note(self, owner: Any, name: str, value: Any, frame: FrameType) -> None:
        location = self._location(owner)
        if location is None:
            return
        tree, prefix = location
        key = f"{prefix}{name}"
        if dataclasses.is_dataclass(value):
            self._paths[id(value)] = (tree, key + ".", value)
            return
        reader = reader_of(frame)
        if reader is not None:
            self.read[tree].setdefault(key, reader)

    def _location(self, owner: Any) -> tuple[str, str] | None:
        if type(owner) in self._roots:
            return self._roots[type(owner)], ""
        path = self._paths.get(id(owner))
        return path[:2] if path is not None and path[2] is owner else None


def reader_of(frame: FrameType | None) -> str | None:
    """Returns `file:line` of the code that reads the value; None for the config package and copying code."""
    while frame is not None and (_reads_for_caller(frame) or frame.f_code.co_filename == SELF):
        frame = frame.f_back
    if frame is None:
        return None
    file = frame.f_code.co_filename
    generated = file.startswith("<")  # a dataclass's own __repr__ and __eq__
    if generated or file.startswith(CONFIG_ROOM) or file.endswith(COPYING):
        return None
    return f"{file}:{frame.f_lineno}"


def _reads_for_caller(frame: FrameType) -> bool:
    """Whether the frame is a method of a schema class, or a function that looks up a dotted key."""
    if not frame.f_code.co_filename.startswith(CONFIG_ROOM):
        return False
    is_method = dataclasses.is_dataclass(frame.f_locals.get("self"))
    return is_method or frame.f_code in LOOKUPS


@contextmanager
def recording() -> Iterator[Recorder]:
    """Records the reads of all config objects inside the `with` block."""
    recorder, classes = Recorder(), schema_classes()

    def watch(cls: type, names: set[str]) -> None:
        def __getattribute__(self: Any, name: str) -> Any:
            value = object.__getattribute__(self, name)
            if name in names:
                recorder.note(self, name, value, sys._getframe(1))
            return value

        cls.__getattribute__ = __getattribute__  # type: ignore[method-assign, assignment]

    for cls, names in classes.items():
        watch(cls, names)
    try:
        yield recorder
    finally:
        for cls in classes:
            del cls.__getattribute__
