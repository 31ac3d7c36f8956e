"""One table from a name to "module:object", resolved when asked for; no import side effects.

A user's own is named "pkg.mod:object" or put in the same table by a decorator.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


class UnknownName(ValueError):
    """A name that no table entry has; the message proposes the nearest ones."""


@dataclass(frozen=True)
class Entry:
    """Where an object lives, and the columns it reads beyond those all objects of its kind get."""

    target: str | Any
    """"module:object", or the object itself when a decorator registered it."""
    needs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    needs_from: str | None = None
    """"module:function" giving further needed columns from the configuration."""


class Table:
    """Names of one kind of plug-in."""

    def __init__(self, kind: str, entries: Mapping[str, Entry]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def names(self) -> list[str]:
        return sorted(self._entries)

    def entry(self, name: str) -> Entry:
        """The entry of a name, or one made from "pkg.mod:object"."""
        name = getattr(name, "value", name)  # the family passes enum members too
        if name in self._entries:
            return self._entries[name]
        if isinstance(name, str) and ":" in name:
            found = load(name, self.kind)
            return Entry(found, tuple(getattr(found, "needs", ())))
        near = difflib.get_close_matches(str(name), self._entries, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownName(
            f"unknown {self.kind} {name!r}.{hint} Known: {', '.join(self.names())}; "
            f'or your own as "pkg.mod:object"'
        )

    def get(self, name: str) -> Any:
        target = self.entry(name).target
        return load(target, self.kind) if isinstance(target, str) else target

    def register(self, name: str, needs: tuple[str, ...] = ()) -> Callable[[T], T]:
        """Decorator. Registering again is fine; another object under a taken name is an error."""

        def add(thing: T) -> T:
            taken = self._entries.get(name)
            if taken is not None and not _same(self.get(name), thing):
                raise ValueError(
                    f"{self.kind} {name!r} is already registered as {self.get(name)!r}; "
                    "choose another name"
                )
            if taken is None:
                self._entries[name] = Entry(thing, needs or tuple(getattr(thing, "needs", ())))
            return thing

        return add


def _same(a: Any, b: Any) -> bool:
    """Also true for one module imported twice, as a script and by name."""
    where = [(getattr(x, "__module__", None), getattr(x, "__qualname__", None)) for x in (a, b)]
    return a is b or (where[0] == where[1] and None not in where[0])


def load(path: str, kind: str) -> Any:
    """Import "module:object"; the error says which part is missing."""
    module_name, _, attribute = path.partition(":")
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UnknownName(f"{kind} {path!r}: cannot import {module_name!r} ({error})") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UnknownName(f"{kind} {path!r}: {module_name!r} has no {attribute!r}")
        found = getattr(found, part)
    return found
