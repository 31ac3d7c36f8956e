"""Plain data across the wall, on the judge's side: requests written, answers read and checked.

What comes from the program is hostile. It is JSON with tags, and becomes exact built-in types, instances
of classes that the tests themselves define, or a handle; anything else is Malformed.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeAlias

Value: TypeAlias = Any
"""A value of the program or of its tests: what it is, only they know."""
Table: TypeAlias = list[tuple[str, dict[str, Value]]]
"""Class and attributes of the shared objects that a request names, by number."""

MAX_FRAME = 16 << 20
_MAX_HEX = 1 << 18  # digits of an integer
_FLAT = frozenset({type(None), bool, int, float, str, bytes, complex})


_REFUSALS = (
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
    MemoryError,
)


class Malformed(Exception):
    """The program's box sent something that is no answer."""


class Reader:
    """Reads one answer. Objects of shared classes are made first and filled at the end."""

    def __init__(
        self,
        shared: dict[str, type],
        known: list[Value],
        handle: Callable[[str, int], Value],
        exception: Callable[[list[str]], type],
    ) -> None:
        self._shared, self._handle, self._exception = shared, handle, exception
        self._objects: dict[int, Value] = dict(enumerate(known))
        self._makers: dict[str, Callable[[Value], Value]] = {
            "i": _large_integer,
            "t": lambda items: tuple(_list(items)),
            "s": lambda items: set(_list(items)),
            "f": lambda items: frozenset(_list(items)),
            "d": _mapping,
            "b": lambda text: _text(text).encode("latin-1"),
            "B": lambda text: bytearray(_text(text).encode("latin-1")),
            "r": lambda items: range(*_integers(items, 3)),
            "c": lambda items: complex(*_floats(items)),
            "K": lambda items: dict.fromkeys(_list(items)).keys(),
            "I": lambda items: dict(_tuples(items)).items(),
            "V": lambda items: dict(enumerate(_list(items))).values(),
            "q": _deque,
            "C": lambda pairs: collections.Counter(_mapping(pairs)),
            "O": lambda pairs: collections.OrderedDict(_mapping(pairs)),
            "D": lambda pairs: collections.defaultdict(None, _mapping(pairs)),
            "N": lambda text: Decimal(_text(text)[:_MAX_HEX]),
            "F": lambda items: Fraction(*_integers(items, 2)),
            "M": lambda items: Match(*_list(items)),
            "o": self._object,
            "h": lambda number: handle("handle", _integer(number)),
            "g": lambda number: handle("iterator", _integer(number)),
            "e": lambda names: exception([_text(name) for name in _list(names)]),
            "-": lambda _: ABSENT,
            ".": lambda _: ...,
        }

    def read(self, data: bytes) -> tuple[str, Value, list[Value]]:
        """(kind, value, changed arguments) of a message."""
        try:
            message = json.loads(data, object_hook=self._tagged)
            kind, value, table, after = _list(message)
            for number, name, attributes in map(_list, _list(table)):
                self._fill(self._object([number, name]), _mapping(attributes))
            return _text(kind), value, [_list(change) for change in _list(after)]
        except _REFUSALS as error:
            raise Malformed(f"{type(error).__name__}: {error}"[:200]) from None

    def _tagged(self, content: dict[str, Value]) -> Value:
        if len(content) != 1:
            raise Malformed("an object without a tag")
        ((tag, value),) = content.items()
        return self._makers[tag](value)

    def _object(self, content: Value) -> Value:
        number, name = _list(content)
        if _integer(number) not in self._objects:
            self._objects[number] = object.__new__(self._shared[_text(name)])
        return self._objects[number]

    def _fill(self, made: Value, attributes: dict[Value, Value]) -> None:
        """Attributes hold data; none may stand in front of a method of the tests' class."""
        for name in attributes:
            if _is_behaviour(getattr(type(made), _text(name), None)) or name.startswith("__"):
                raise Malformed(f"attribute {name!r} would replace a method")
        made.__dict__.clear()
        made.__dict__.update(attributes)


@dataclass(frozen=True, eq=False)
class Match:
    """A regular expression's match: true, as every match is, and equal to nothing."""

    group: Value
    start: Value
    end: Value


class Absent:
    """The program has no such name."""


ABSENT = Absent()


def _is_behaviour(value: Value) -> bool:
    return callable(value) or hasattr(type(value), "__get__")


def _list(value: Value) -> list[Value]:
    if type(value) is not list:
        raise Malformed("a list was expected")
    return value


def _text(value: Value) -> str:
    if type(value) is not str:
        raise Malformed("text was expected")
    return value


def _integer(value: Value) -> int:
    if type(value) is not int or value < 0:
        raise Malformed("a number was expected")
    return value


def _integers(value: Value, count: int) -> list[int]:
    if len(_list(value)) != count or any(type(item) is not int for item in value):
        raise Malformed("integers were expected")
    return list(value)


def _floats(value: Value) -> list[float]:
    if len(_list(value)) != 2 or any(type(item) is not float for item in value):
        raise Malformed("floats were expected")
    return list(value)


def _tuples(value: Value) -> list[tuple[Value, Value]]:
    if any(type(item) is not tuple or len(item) != 2 for item in _list(value)):
        raise Malformed("pairs were expected")
    return list(value)


def _mapping(value: Value) -> dict[Value, Value]:
    items = _list(value)
    if len(items) % 2:
        raise Malformed("a key without a value")
    return dict(zip(items[::2], items[1::2], strict=True))


def _large_integer(value: Value) -> int:
    if len(_text(value)) > _MAX_HEX:
        raise Malformed("an integer of too many digits")
    return int(value, 16)


def _deque(value: Value) -> Value:
    items, size = _list(value)
    return collections.deque(_list(items), None if size is None else _integer(size))


# ---- what goes to the program, which may know it all ----


class NotPlain(TypeError):
    """An argument of the tests that cannot be sent."""


class Writer:
    """Arguments of one request: native types as they are, others as (..., tag, content)."""

    def __init__(
        self,
        shared: dict[str, type],
        handle_of: Callable[[Value], int | None],
        callback: Callable[[Value], int],
    ) -> None:
        self._shared, self._handle_of, self._callback = shared, handle_of, callback
        self._numbers: dict[int, int] = {}
        self.objects: list[Value] = []

    def write(self, value: Value) -> Value:
        kind = type(value)
        if kind in _FLAT:
            return value
        if kind is list:
            return value if _FLAT.issuperset(map(type, value)) else self._each(value)
        if kind is tuple:
            if value[:1] == (...,):
                raise NotPlain("a tuple that begins with ... cannot be sent to the program")
            return value if _FLAT.issuperset(map(type, value)) else tuple(self._each([*value]))
        if kind is dict:
            return {key: self.write(item) for key, item in value.items()}
        if kind in (set, frozenset):
            return value
        return self._rare(value, kind)

    def _each(self, items: list[Value]) -> list[Value]:
        return [self.write(item) for item in items]

    def _rare(self, value: Value, kind: type) -> Value:
        number = self._handle_of(value)
        if number is not None:
            return (..., "h", number)
        if value is ...:
            return (..., ".")
        if kind is bytearray:
            return (..., "B", bytes(value))
        if kind is range:
            return (..., "r", [value.start, value.stop, value.step])
        if kind is collections.deque:
            return (..., "q", self._each([*value]), value.maxlen)
        if kind is collections.Counter:
            return (..., "C", self.write(dict(value)))
        if kind is collections.OrderedDict:
            return (..., "O", self.write(dict(value)))
        if kind is collections.defaultdict:
            factory = value.default_factory
            return (..., "D", self.write(dict(value)), factory and factory.__name__)
        if kind is Decimal:
            return (..., "N", str(value))
        if kind is Fraction:
            return (..., "F", [value.numerator, value.denominator])
        if self._shared.get(kind.__name__) is kind:
            return (..., "o", self._object(value))
        if getattr(value, "__module__", None) == "builtins" and callable(value):
            return (..., "builtin", value.__name__)
        if callable(value):
            return (..., "b", self._callback(value))
        if hasattr(kind, "__next__"):
            return self._each([*value])
        raise NotPlain(f"{kind.__name__} is not plain data: it cannot be sent to the program")

    def _object(self, value: Value) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        return self._numbers[id(value)]

    def table(self) -> Table:
        """Class and attributes of every shared object, found while it is written."""
        rows = []
        for value in self.objects:  # grows meanwhile
            rows.append((type(value).__name__, self.write(value.__dict__)))
        return rows


def update(mine: Value, theirs: Value) -> Value:
    """`mine` with the content of `theirs` where both are of one changeable type; else `theirs`."""
    kind = type(mine)
    if type(theirs) is not kind:
        return theirs
    if kind in (list, collections.deque):
        paired = min(len(mine), len(theirs))
        items = [update(mine[i], theirs[i]) for i in range(paired)]
        items += [theirs[i] for i in range(paired, len(theirs))]
        mine.clear()
        mine.extend(items)
        return mine
    if issubclass(kind, dict):
        pairs = {key: update(mine.get(key), value) for key, value in theirs.items()}
        mine.clear()
        dict.update(mine, pairs)
        return mine
    if kind in (set, bytearray):
        mine.clear()
        (mine.update if kind is set else mine.extend)(theirs)
        return mine
    if kind is tuple and len(mine) == len(theirs):
        return tuple([update(a, b) for a, b in zip(mine, theirs, strict=True)])
    return theirs
