"""The judge's side of the data exchange with the program.

Requests may hold anything that the program may know. Answers are untrusted: tagged JSON is read as exact
built-in types, instances of the tests' classes or handles; anything else raises Malformed.
"""

from __future__ import annotations

import collections
import io
import json
import marshal
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn, TypeAlias

Value: TypeAlias = Any
"""A value of the program or of its tests, whose type is not known here."""
Shape: TypeAlias = type | list[type]
"""The exact type of a tag's content, or the exact types of its items."""

MAX_FRAME = 16 << 20
_MAX_DIGITS = 1 << 18
_FLAT = frozenset({type(None), bool, int, float, str, bytes, complex})
_SENT = (
    *(collections.deque, collections.Counter, collections.OrderedDict, collections.defaultdict),
    *(Decimal, Fraction, range, complex, bytearray, type(...)),
)
_REFUSALS = (
    *(ValueError, TypeError, ArithmeticError, LookupError, AttributeError),
    *(RecursionError, MemoryError),
)


class Malformed(Exception):
    """The program's box sent an invalid answer."""


class NotPlain(TypeError):
    """The tests passed an argument that cannot be sent."""


@dataclass(frozen=True, eq=False)
class Match:
    """A regular expression match: truthy, as every match is, and equal to nothing else."""

    group: Value
    start: Value
    end: Value


class Absent:
    """Marks a name that the program does not define."""


ABSENT = Absent()


class Reader:
    """Reads one answer. Objects of shared classes are created first and filled at the end."""

    def __init__(
        self,
        shared: dict[str, type],
        objects: list[Value],
        handle: Callable[[str, int], Value],
        exception: Callable[[list[str]], type],
    ) -> None:
        self._shared = shared
        self._objects: dict[int, Value] = dict(enumerate(objects))
        self._tags: dict[str, tuple[Shape, Callable[[Value], Value]]] = {
            **_TAGS,
            "o": ([int, str], self._object),
            "h": (int, lambda number: handle("handle", _natural(number))),
            "g": (int, lambda number: handle("iterator", _natural(number))),
            "e": (list, lambda names: exception([_checked(name, str) for name in names])),
        }

    def read(self, data: bytes) -> tuple[str, Value, list[Value]]:
        """Returns (kind, value, changed arguments) of a message."""
        try:
            message = json.loads(data, object_hook=self._tagged)
            kind, value, table, after = _checked(message, list)
            for row in _checked(table, list):
                number, name, attributes = _checked(row, [int, str, list])
                self._fill(self._object([number, name]), _mapping(attributes))
            return (
                _checked(kind, str),
                value,
                [_checked(change, list) for change in _checked(after, list)],
            )
        except _REFUSALS as error:
            raise Malformed(f"{type(error).__name__}: {error}"[:200]) from None

    def _tagged(self, content: dict[str, Value]) -> Value:
        ((tag, value),) = content.items()
        shape, make = self._tags[tag]
        return make(_checked(value, shape))

    def _object(self, content: list[Value]) -> Value:
        number, name = content
        if number not in self._objects:
            self._objects[number] = object.__new__(self._shared[name])
        return self._objects[number]

    @staticmethod
    def _fill(shared: Value, attributes: dict[Value, Value]) -> None:
        """Set the attributes, which are data; none may shadow a method of the tests' class."""
        for name in attributes:
            member = getattr(type(shared), _checked(name, str), None)
            if callable(member) or hasattr(type(member), "__get__") or name.startswith("__"):
                raise Malformed(f"attribute {name!r} would replace a method")
        shared.__dict__.clear()
        shared.__dict__.update(attributes)


def _checked(value: Value, shape: Shape) -> Value:
    if isinstance(shape, type):
        fits = type(value) is shape
    else:
        fits = type(value) is list and [type(item) for item in value] == shape
    if not fits:
        raise Malformed(f"{shape} was expected")
    return value


def _natural(number: int) -> int:
    if number < 0:
        raise Malformed("a number was expected")
    return number


def _mapping(items: list[Value]) -> dict[Value, Value]:
    return dict(zip(items[::2], items[1::2], strict=True))


def _large_integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise Malformed("an integer of too many digits")
    return int(text, 16)


def _deque(content: list[Value]) -> Value:
    items, size = content
    return collections.deque(_checked(items, list), size)


_TAGS: dict[str, tuple[Shape, Callable[[Value], Value]]] = {
    "i": (str, _large_integer),
    "t": (list, tuple),
    "s": (list, set),
    "f": (list, frozenset),
    "d": (list, _mapping),
    "b": (str, lambda text: text.encode("latin-1")),
    "B": (str, lambda text: bytearray(text.encode("latin-1"))),
    "r": ([int, int, int], lambda parts: range(*parts)),
    "c": ([float, float], lambda parts: complex(*parts)),
    "K": (list, lambda items: dict.fromkeys(items).keys()),
    "I": (list, lambda items: _mapping(items).items()),
    "V": (list, lambda items: dict(enumerate(items)).values()),
    "q": (list, _deque),
    "C": (list, lambda items: collections.Counter(_mapping(items))),
    "O": (list, lambda items: collections.OrderedDict(_mapping(items))),
    "D": (list, lambda items: collections.defaultdict(None, _mapping(items))),
    "N": (str, lambda text: Decimal(text[:_MAX_DIGITS])),
    "F": ([int, int], lambda parts: Fraction(*parts)),
    "M": (list, lambda parts: Match(*parts)),
    "-": (type(None), lambda _: ABSENT),
    ".": (type(None), lambda _: ...),
}
"""Tag → the shape of its content, and a function to the value."""


def resolve(kind: str, key: Value) -> NoReturn:
    """Placeholder in a request, replaced by an object in the program's box (see answering.py)."""
    raise NotImplementedError(kind, key)


class Writer(pickle.Pickler):
    """Writes one request: plain values natively; handles, functions and shared objects by number."""

    def __init__(
        self,
        shared: dict[str, type],
        handle_of: Callable[[Value], int | None],
        register: Callable[[Value], int],
    ) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer)
        self._shared, self._handle_of, self._register = shared, handle_of, register
        self.objects: list[Value] = []

    def write(self, request: tuple[Value, ...]) -> bytes:
        try:
            if _is_native(request):  # the usual case: marshal needs no imports to read it
                return b"m" + marshal.dumps(request)
        except (RecursionError, ValueError):
            pass  # the list contains itself, or is too deep for marshal
        self.dump(request)
        for shared in self.objects:  # dump() may append
            self.dump(shared.__dict__)
        return b"p" + self._buffer.getvalue()

    def reducer_override(self, value: Value) -> Value:
        kind = type(value)
        number = self._handle_of(value)
        if number is not None:
            return resolve, ("handle", number)
        if kind in _SENT or value is resolve or (isinstance(value, type) and value in _SENT):
            return NotImplemented
        if self._shared.get(kind.__name__) is kind:
            self.objects.append(value)
            return resolve, ("object", kind.__name__)
        if callable(value):
            if getattr(value, "__module__", None) == "builtins":
                return NotImplemented
            return resolve, ("callback", self._register(value))
        if hasattr(kind, "__next__"):
            return list, ([*value],)
        raise NotPlain(f"{kind.__name__} is not plain data: it cannot be sent to the program")


def _is_native(value: Value) -> bool:
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        return _FLAT.issuperset(map(type, value)) or all(map(_is_native, value))
    if kind is dict:
        return all(map(_is_native, value)) and all(map(_is_native, value.values()))
    return kind in _FLAT


def update(mine: Value, theirs: Value) -> Value:
    """Returns `mine` with the content of `theirs` if they have the same mutable type, else `theirs`."""
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
