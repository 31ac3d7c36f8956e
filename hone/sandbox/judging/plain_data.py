"""Writes requests to the program's box, and reads its answers.

Requests contain only what the program may know. Answers are untrusted: tagged JSON is read as exact
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
_SCALAR_TYPES = frozenset({type(None), bool, int, float, str, bytes, complex})
_PICKLED_TYPES = (
    *(collections.deque, collections.Counter, collections.OrderedDict, collections.defaultdict),
    *(Decimal, Fraction, range, complex, bytearray, type(...)),
)
_PARSE_ERRORS = (
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
            "h": (int, lambda number: handle("handle", _non_negative(number))),
            "g": (int, lambda number: handle("iterator", _non_negative(number))),
            "e": (list, lambda names: exception([_check_shape(name, str) for name in names])),
        }

    def read(self, data: bytes) -> tuple[str, Value, list[Value]]:
        """Returns (kind, value, changed arguments) of a message."""
        try:
            message = json.loads(data, object_hook=self._decode_tag)
            kind, value, table, changes = _check_shape(message, list)
            for row in _check_shape(table, list):
                number, name, attributes = _check_shape(row, [int, str, list])
                self._set_attributes(self._object([number, name]), _mapping(attributes))
            return (
                _check_shape(kind, str),
                value,
                [_check_shape(change, list) for change in _check_shape(changes, list)],
            )
        except _PARSE_ERRORS as error:
            raise Malformed(f"{type(error).__name__}: {error}"[:200]) from None

    def _decode_tag(self, content: dict[str, Value]) -> Value:
        ((tag, value),) = content.items()
        shape, convert = self._tags[tag]
        return convert(_check_shape(value, shape))

    def _object(self, content: list[Value]) -> Value:
        number, name = content
        if number not in self._objects:
            self._objects[number] = object.__new__(self._shared[name])
        return self._objects[number]

    @staticmethod
    def _set_attributes(shared: Value, attributes: dict[Value, Value]) -> None:
        """Sets the attributes; raises Malformed if one would shadow a method of the class."""
        for name in attributes:
            member = getattr(type(shared), _check_shape(name, str), None)
            if callable(member) or hasattr(type(member), "__get__") or name.startswith("__"):
                raise Malformed(f"attribute {name!r} would replace a method")
        shared.__dict__.clear()
        shared.__dict__.update(attributes)


def _check_shape(value: Value, shape: Shape) -> Value:
    """Returns the value, or raises Malformed if it does not have exactly this shape."""
    if isinstance(shape, type):
        fits = type(value) is shape
    else:
        fits = type(value) is list and [type(item) for item in value] == shape
    if not fits:
        raise Malformed(f"{shape} was expected")
    return value


def _non_negative(number: int) -> int:
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
    return collections.deque(_check_shape(items, list), size)


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
"""Tag → the shape of its content, and the function from content to value."""


def resolve(kind: str, key: Value) -> NoReturn:
    """Marks an object in a request; program_server.py replaces it with an object of its box."""
    raise NotImplementedError(kind, key)


class Writer(pickle.Pickler):
    """Writes one request: plain values directly, other objects and functions by number."""

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
            if _is_marshalable(request):  # the usual case: reading marshal needs no imports
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
        is_pickled_type = isinstance(value, type) and value in _PICKLED_TYPES
        if kind in _PICKLED_TYPES or is_pickled_type or value is resolve:
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


def _is_marshalable(value: Value) -> bool:
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        return _SCALAR_TYPES.issuperset(map(type, value)) or all(map(_is_marshalable, value))
    if kind is dict:
        return all(map(_is_marshalable, value)) and all(map(_is_marshalable, value.values()))
    return kind in _SCALAR_TYPES


def update(local: Value, remote: Value) -> Value:
    """Copies `remote` into `local` if both have the same mutable type; returns the new value."""
    kind = type(local)
    if type(remote) is not kind:
        return remote
    if kind in (list, collections.deque):
        paired = min(len(local), len(remote))
        items = [update(local[i], remote[i]) for i in range(paired)]
        items += [remote[i] for i in range(paired, len(remote))]
        local.clear()
        local.extend(items)
        return local
    if issubclass(kind, dict):
        pairs = {key: update(local.get(key), value) for key, value in remote.items()}
        local.clear()
        dict.update(local, pairs)
        return local
    if kind in (set, bytearray):
        local.clear()
        (local.update if kind is set else local.extend)(remote)
        return local
    if kind is tuple and len(local) == len(remote):
        return tuple([update(a, b) for a, b in zip(local, remote, strict=True)])
    return remote
