"""Writes requests to the program's box, and reads the answers.

An answer is untrusted JSON with tags, which becomes values of built-in types, instances of shared classes
and proxies. Any other answer raises MalformedAnswer. Shared classes are those that the preamble defines,
the code that both boxes run first.
"""

from __future__ import annotations

import collections
import datetime
import enum
import io
import json
import marshal
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from types import MemberDescriptorType
from typing import Any, NoReturn, TypeAlias

Value: TypeAlias = Any  # a value of any type, of the program or of its tests
Shape: TypeAlias = type | list[type]
"""The exact type of the content of a tag, or the exact types of the items in a list."""

VALUE, EXCEPTION, CALLBACK = "v", "x", "b"
"""The kinds of messages from the program's box; a callback asks to call a function of the tests."""
MAX_ANSWER_BYTES = 16 << 20
_MAX_DIGITS = 1 << 18  # of a large integer or decimal
_SCALAR_TYPES = frozenset({type(None), bool, int, float, str, bytes, complex})
_PICKLED_TYPES = (
    *(collections.deque, collections.Counter, collections.OrderedDict, collections.defaultdict),
    *(Decimal, Fraction, range, complex, bytearray, type(...)),
    *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta, datetime.timezone),
)
_PARSE_ERRORS = (
    *(ValueError, TypeError, ArithmeticError, LookupError, AttributeError),
    *(RecursionError, MemoryError),
)


class MalformedAnswer(Exception):
    """The program's box sent an invalid answer."""


class NotPlainData(TypeError):
    """The tests passed an argument that cannot be sent to the program."""


@dataclass(frozen=True, eq=False)
class Match:
    """The data of an `re.Match`; an instance is truthy and compares by identity, as an `re.Match` does."""

    group: Value
    start: Value
    end: Value


class Absent:
    """The type of ABSENT, the answer for a name that the program does not define."""


ABSENT = Absent()


class AnswerReader:
    """Reads one answer: first the values, then the attributes of instances of shared classes."""

    def __init__(
        self,
        shared_classes: dict[str, type],
        sent_objects: list[Value],
        make_proxy: Callable[[str, int], Value],
        make_exception_class: Callable[[list[str]], type],
    ) -> None:
        self._shared_classes = shared_classes
        self._objects: dict[int, Value] = dict(enumerate(sent_objects))
        self._tags: dict[str, tuple[Shape, Callable[[Value], Value]]] = {
            **_TAGS,
            "o": ([int, str], self._get_object),
            "m": (list, self._get_member),
            "n": ([str, list], self._get_named_tuple),
            "h": (int, lambda handle: make_proxy("handle", _non_negative(handle))),
            "g": (int, lambda handle: make_proxy("iterator", _non_negative(handle))),
            "e": (
                list,
                lambda names: make_exception_class([_check_shape(name, str) for name in names]),
            ),
        }

    def read(self, data: bytes) -> tuple[str, Value, list[Value]]:
        """Returns the kind of a message, the value, and the arguments that the program changed."""
        try:
            message = json.loads(data, object_hook=self._decode_tag)
            kind, value, object_states, changes = _check_shape(message, list)
            for state in _check_shape(object_states, list):
                object_id, name, attributes = _check_shape(state, [int, str, list])
                self._set_attributes(self._get_object([object_id, name]), _pair_up(attributes))
            return (
                _check_shape(kind, str),
                value,
                [_check_shape(change, list) for change in _check_shape(changes, list)],
            )
        except _PARSE_ERRORS as error:
            raise MalformedAnswer(f"{type(error).__name__}: {error}"[:200]) from None

    def _decode_tag(self, content: dict[str, Value]) -> Value:
        ((tag, value),) = content.items()
        shape, convert = self._tags[tag]
        return convert(_check_shape(value, shape))

    def _get_object(self, content: list[Value]) -> Value:
        """Returns the shared object with an id; creates it if the id is new."""
        object_id, name = content
        if object_id not in self._objects:
            self._objects[object_id] = object.__new__(self._shared_classes[name])
        return self._objects[object_id]

    def _get_member(self, content: list[Value]) -> Value:
        """Returns a member of a shared enumeration."""
        name, value = content
        shared_class = self._shared_classes[_check_shape(name, str)]
        if not issubclass(shared_class, enum.Enum):
            raise MalformedAnswer("an enumeration was expected")
        return shared_class(value)

    def _get_named_tuple(self, content: list[Value]) -> Value:
        name, items = content
        shared_class: Value = self._shared_classes[name]
        if not issubclass(shared_class, tuple) or len(items) != len(shared_class._fields):
            raise MalformedAnswer("a named tuple was expected")
        return tuple.__new__(shared_class, items)

    @staticmethod
    def _set_attributes(instance: Value, attributes: dict[Value, Value]) -> None:
        """Replaces all attributes; raises MalformedAnswer for an attribute with the name of a method."""
        slots = slots_of(instance)
        for name in attributes.keys() - slots.keys():
            member = getattr(type(instance), _check_shape(name, str), None)
            if callable(member) or hasattr(type(member), "__get__") or name.startswith("__"):
                raise MalformedAnswer(f"attribute {name!r} would replace a method")
        for name, slot in slots.items():
            if name in attributes:
                slot.__set__(instance, attributes.pop(name))
            elif hasattr(instance, name):
                slot.__delete__(instance)
        if attributes or hasattr(instance, "__dict__"):
            instance.__dict__.clear()
            instance.__dict__.update(attributes)


def slots_of(instance: Value) -> dict[str, MemberDescriptorType]:
    """Returns the slots of an object by name."""
    return {
        name: member
        for base in type(instance).__mro__
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType) and not name.startswith("__")
    }


def _attributes(instance: Value) -> dict[str, Value]:
    """Returns the attributes of an object, also of its slots."""
    slots = {
        name: getattr(instance, name) for name in slots_of(instance) if hasattr(instance, name)
    }
    return {**slots, **getattr(instance, "__dict__", {})}


def _check_shape(value: Value, shape: Shape) -> Value:
    """Returns the value, or raises MalformedAnswer if it does not have exactly this shape."""
    if isinstance(shape, type):
        has_shape = type(value) is shape
    else:
        has_shape = type(value) is list and [type(item) for item in value] == shape
    if not has_shape:
        raise MalformedAnswer(f"{shape} was expected")
    return value


def _non_negative(number: int) -> int:
    if number < 0:
        raise MalformedAnswer("a number of at least 0 was expected")
    return number


def _pair_up(items: list[Value]) -> dict[Value, Value]:
    """Returns the dict of a list [key, value, key, value, …]."""
    return dict(zip(items[::2], items[1::2], strict=True))


def _parse_large_integer(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise MalformedAnswer("an integer has too many digits")
    return int(text, 16)


_TAGS: dict[str, tuple[Shape, Callable[[Value], Value]]] = {
    "i": (str, _parse_large_integer),
    "t": (list, tuple),
    "s": (list, set),
    "f": (list, frozenset),
    "d": (list, _pair_up),
    "b": (str, lambda text: text.encode("latin-1")),
    "B": (str, lambda text: bytearray(text.encode("latin-1"))),
    "r": ([int, int, int], lambda items: range(*items)),
    "c": ([float, float], lambda items: complex(*items)),
    "K": (list, lambda items: dict.fromkeys(items).keys()),
    "I": (list, lambda items: _pair_up(items).items()),
    "V": (list, lambda items: dict(enumerate(items)).values()),
    "q": (list, lambda items: collections.deque(_check_shape(items[0], list), *items[1:])),
    "C": (list, lambda items: collections.Counter(_pair_up(items))),
    "O": (list, lambda items: collections.OrderedDict(_pair_up(items))),
    "D": (list, lambda items: collections.defaultdict(None, _pair_up(items))),
    "N": (str, lambda text: Decimal(text[:_MAX_DIGITS])),
    "F": ([int, int], lambda items: Fraction(*items)),
    "M": (list, lambda items: Match(*items)),
    "Y": (str, datetime.date.fromisoformat),
    "H": (str, datetime.time.fromisoformat),
    "T": (str, datetime.datetime.fromisoformat),
    "U": ([int, int, int], lambda items: datetime.timedelta(*items)),
    "-": (type(None), lambda _: ABSENT),
    ".": (type(None), lambda _: ...),
}
"""By tag: the shape of the content, and the function that converts the content to a value."""


def resolve(kind: str, key: Value) -> NoReturn:
    """Stands for an object in a pickle; program_server.py calls `Request._resolve`, which returns it."""
    raise NotImplementedError(kind, key)


class RequestWriter(pickle.Pickler):
    """Pickles a request: data by value, objects of the program by handle, functions of the tests by id."""

    def __init__(
        self,
        shared_classes: dict[str, type],
        find_handle: Callable[[Value], int | None],
        register_callback: Callable[[Value], int],
    ) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer)
        self._shared_classes = shared_classes
        self._find_handle, self._register_callback = find_handle, register_callback
        self.shared_objects: list[Value] = []

    def write(self, request: tuple[Value, ...]) -> bytes:
        try:
            if _is_marshalable(request):  # the program reads marshal faster than a pickle
                return b"m" + marshal.dumps(request)
        except (RecursionError, ValueError):
            pass  # a value contains itself, or is nested too deeply for marshal
        self.dump(request)
        for instance in self.shared_objects:  # dump() may append
            self.dump(_attributes(instance))
        return b"p" + self._buffer.getvalue()

    def reducer_override(self, value: Value) -> Value:
        value_type = type(value)
        handle = self._find_handle(value)
        if handle is not None:
            return resolve, ("handle", handle)
        is_pickled_type = isinstance(value, type) and value in _PICKLED_TYPES
        if value_type in _PICKLED_TYPES or is_pickled_type or value is resolve:
            return NotImplemented
        if self._shared_classes.get(value_type.__name__) is value_type:
            if isinstance(value, enum.Enum):
                return resolve, ("member", (value_type.__name__, value.value))
            if isinstance(value, tuple):
                return resolve, ("named tuple", (value_type.__name__, [*value]))
            self.shared_objects.append(value)
            return resolve, ("object", value_type.__name__)
        if callable(value):
            if getattr(value, "__module__", None) == "builtins":
                return NotImplemented
            return resolve, ("callback", self._register_callback(value))
        if hasattr(value_type, "__next__"):
            return list, ([*value],)
        raise NotPlainData(
            f"{value_type.__name__} is not plain data: it cannot be sent to the program"
        )


def _is_marshalable(value: Value) -> bool:
    """Returns whether a value has only types that marshal supports."""
    value_type = type(value)
    if value_type in (list, tuple, set, frozenset):
        return _SCALAR_TYPES.issuperset(map(type, value)) or all(map(_is_marshalable, value))
    if value_type is dict:
        return all(map(_is_marshalable, value)) and all(map(_is_marshalable, value.values()))
    return value_type in _SCALAR_TYPES


def update_in_place(local: Value, remote: Value) -> Value:
    """Copies the content of `remote` into `local` and returns `local`, or `remote` if this is impossible."""
    value_type = type(local)
    if type(remote) is not value_type:
        return remote
    if value_type in (list, collections.deque):
        items = [*map(update_in_place, local, remote)]
        items += [*remote][len(local) :]
        local.clear()
        local.extend(items)
        return local
    if issubclass(value_type, dict):
        pairs = {key: update_in_place(local.get(key), value) for key, value in remote.items()}
        local.clear()
        dict.update(local, pairs)
        return local
    if value_type in (set, bytearray):
        local.clear()
        (local.update if value_type is set else local.extend)(remote)
        return local
    if value_type is tuple and len(local) == len(remote):
        return tuple(map(update_in_place, local, remote))
    return remote
