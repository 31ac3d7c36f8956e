"""Proxies through which the tests use names, functions and objects of the program's box.

A proxy forwards calls and returns plain data. The program never decides what is equal, true or
contained: a test that needs this ends the judgement. plain_data.py reads the data.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import os
import sys
from collections.abc import Callable, Iterator
from inspect import CO_OPTIMIZED
from types import CodeType
from typing import NoReturn

from hone.sandbox.judging.plain_data import (
    ABSENT,
    MAX_FRAME,
    Malformed,
    Reader,
    Value,
    Writer,
    update,
)

# Operators that are forwarded. None of them shows the program the expected value, as `-` would in
# `abs(f(x) - 3) < 1e-6`.
_OPERATORS = (
    *("len", "getitem", "setitem", "delitem", "str", "repr", "enter", "exit"),
    *("abs", "neg", "pos", "int", "float", "index", "round"),
)
_FORWARDED_DUNDERS = frozenset({"__name__", "__qualname__"})
_PREDICATES = frozenset(
    name
    for kind in (str, bytes, list, dict, set, int, float)
    for name in dir(kind)
    if name.startswith("is") or name in ("startswith", "endswith")
)


class TestsFailed(BaseException):
    """Ends the judgement with a failure, even when a bare `except` in the tests catches it."""

    reason: str | None = None

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        TestsFailed.reason = reason


class Session:
    """The connection to the program's box."""

    def __init__(self, channel: int) -> None:
        self.shared: dict[str, type] = {}  # classes that the tests and the program both define
        self.answers = 0
        self._channel = channel
        self._callbacks: list[Callable[..., Value]] = []
        self._exceptions: dict[str, type] = {}

    def wait_until_loaded(self) -> None:
        kind, value, _ = self._receive([])
        if kind != "v":
            raise TestsFailed(f"the program does not load: {_error_text(value)}")

    def request(
        self, operation: str, *fields: Value, arguments: tuple[list[Value], dict[str, Value]]
    ) -> Value:
        """Sends a request, serves callbacks meanwhile, and returns the value or raises."""
        positional, named = arguments
        content = (positional, named) if operation == "call" else (positional,)
        objects = self._send((operation, *fields, *content))
        while True:
            kind, value, changes = self._receive(objects)
            if kind == "b":
                self._run_callback(value)
                continue
            try:  # apply the program's changes to the tests' arguments
                for key, changed in changes:
                    update(named[key] if type(key) is str else positional[key], changed)
            except (LookupError, TypeError, ValueError):
                raise TestsFailed("the program's box changed an unknown argument") from None
            if kind == "x":
                raise self._to_exception(value)
            if kind != "v" or (value is ABSENT and operation != "get"):
                raise TestsFailed("the program's box sent no value")
            return value

    def request_value(self, operation: str, *fields: Value, arguments: Value = ((), {})) -> Value:
        """Calls `request` and counts answers that tell the tests something about the program."""
        value = self.request(operation, *fields, arguments=([*arguments[0]], arguments[1]))
        self.answers += not isinstance(value, Remote)
        return value

    def _send(self, request: tuple[Value, ...]) -> list[Value]:
        """Sends a request and returns the shared objects in it."""
        writer = Writer(self.shared, _handle_of, self._register_callback)
        data = writer.write(request)
        view = memoryview(len(data).to_bytes(8, "big") + data)
        try:
            while view:
                view = view[os.write(self._channel, view) :]
        except OSError:
            raise TestsFailed("the program ended before the tests did") from None
        return writer.objects

    def _receive(self, objects: list[Value]) -> tuple[str, Value, list[Value]]:
        size = int.from_bytes(self._read(8), "big")
        if size > MAX_FRAME:
            raise TestsFailed(f"an answer of {size} bytes; at most {MAX_FRAME} are read")
        try:
            data = self._read(size)
            return Reader(self.shared, objects, self._proxy, self._exception).read(data)
        except Malformed as error:
            raise TestsFailed(f"the program's box sent no answer: {error}") from None

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = os.read(self._channel, min(size, 1 << 20))
            except OSError:
                part = b""
            if not part:
                raise TestsFailed("the program ended before the tests did")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _proxy(self, kind: str, number: int) -> Remote:
        return RemoteIterator(self, number) if kind == "iterator" else Remote(self, number)

    def _exception(self, names: list[str]) -> type:
        """Returns a local class with the name and built-in base of the program's exception."""
        base = _builtin_exception(names)
        if names and names[0] != base.__name__ and names[0] not in self._exceptions:
            self._exceptions[names[0]] = type(names[0], (base,), {})
        return self._exceptions.get(names[0], base) if names else base

    def _to_exception(self, value: Value) -> Exception:
        names, message = _error_parts(value)
        if "Exception" not in names:  # SystemExit, KeyboardInterrupt, GeneratorExit
            raise TestsFailed(f"the program raised {_error_text(value)}")
        try:
            error = self._exception(names)(message)
        except TypeError:  # UnicodeDecodeError and others need more than a message
            error = ValueError(message)
        return error if isinstance(error, Exception) else RuntimeError(message)

    def _register_callback(self, function: Callable[..., Value]) -> int:
        self._callbacks.append(function)
        return len(self._callbacks) - 1

    def _run_callback(self, value: Value) -> None:
        """Runs a function of the tests that the program calls."""
        try:
            number, positional, named = value
            function = self._callbacks[number]
        except (TypeError, ValueError, LookupError):
            raise TestsFailed("the program's box called an unknown function") from None
        try:
            self._send(("return", function(*positional, **named)))
        except Exception as error:
            self._send(("raise", type(error).__name__, str(error)))


class Remote:
    """A function, class or object of the program."""

    __slots__ = ("_number", "_session")

    def __init__(self, session: Session, number: int) -> None:
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Value, **named: Value) -> Value:
        return self._session.request_value("call", self._number, arguments=(arguments, named))

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__") and name.endswith("__") and name not in _FORWARDED_DUNDERS:
            raise AttributeError(name)
        if name in _PREDICATES:  # a program's class must not answer what str or int would
            self._refuse()
        return self._session.request_value("attribute", self._number, name)

    def __setattr__(self, name: str, value: Value) -> None:
        self._session.request("assign", self._number, name, arguments=([value], {}))

    def __iter__(self) -> Iterator[Value]:
        return iter(self._session.request_value("method", self._number, "__iter__"))

    def _refuse(self, *_: Value) -> NoReturn:
        raise TestsFailed("the tests compare an object of the program that is not plain data")

    def __eq__(self, other: object) -> bool:
        return self is other if other is None or self is other else self._refuse()

    def __ne__(self, other: object) -> bool:
        return not self == other

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __instancecheck__ = __subclasscheck__ = _refuse


def _forward(special: str) -> Callable[..., Value]:
    def operator(self: Remote, *arguments: Value) -> Value:
        call: Value = (arguments, {})
        return self._session.request_value("method", self._number, special, arguments=call)

    return operator


for _name in _OPERATORS:
    setattr(Remote, f"__{_name}__", _forward(f"__{_name}__"))


class RemoteIterator(Remote):
    """A generator or iterator of the program, read in growing chunks."""

    __slots__ = ("_chunk_size", "_done", "_items")

    def __init__(self, session: Session, number: int) -> None:
        super().__init__(session, number)
        self._set_state([], False, 1)

    def _set_state(self, items: list[Value], done: bool, chunk_size: int) -> None:
        for name, value in (("_items", items), ("_done", done), ("_chunk_size", chunk_size)):
            object.__setattr__(self, name, value)

    def __iter__(self) -> Iterator[Value]:
        return self

    def __len__(self) -> int:  # list() calls it and ignores the error
        raise TypeError("an iterator of the program has no len()")

    def __next__(self) -> Value:
        if not self._items and not self._done:
            answer = self._session.request_value("next", self._number, self._chunk_size)
            if type(answer) is not list or len(answer) != 2 or type(answer[0]) is not list:
                raise TestsFailed("the program's box sent no items")
            done = answer[1] is not False or not answer[0]
            self._set_state(answer[0][::-1], done, min(2 * self._chunk_size, 1024))
        if not self._items:
            raise StopIteration
        return self._items.pop()


def _handle_of(value: Value) -> int | None:
    return value._number if isinstance(value, Remote) else None


def _error_parts(value: Value) -> tuple[list[str], str]:
    if type(value) is list and len(value) == 2 and type(value[0]) is list:
        names, message = value
        if names and all(type(item) is str for item in [*names, message]):
            return names, message
    raise TestsFailed("the program's box sent no error")


def _error_text(value: Value) -> str:
    names, message = _error_parts(value)
    return f"{names[0]}: {message}"[:300]


def _builtin_exception(names: list[str]) -> type:
    """Returns the nearest built-in exception that cannot silently end a loop or the judge."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            silent = issubclass(kind, (StopIteration, StopAsyncIteration))
            return RuntimeError if silent else kind
    return Exception


class TestNamespace(dict[str, Value]):
    """The global names of the tests; other names are looked up in the program.

    Names of built-ins and standard modules refer to the program only if the tests cannot mean
    anything else: `set` in `set(f(x)) == {1}` must not be a function of the program.
    """

    def __init__(self, session: Session, content: dict[str, Value]) -> None:
        super().__init__(content)
        self._session = session
        self._codes: list[CodeType] = []

    def set_code(self, code: CodeType) -> None:
        """Sets the tests' code, and looks up names of class bodies, which skip __missing__."""
        self._codes = [code]
        for body in self._codes:  # the loop appends to this list
            self._codes += [part for part in body.co_consts if isinstance(part, CodeType)]
        for body in self._codes[1:]:
            for name in () if body.co_flags & CO_OPTIMIZED else body.co_names:
                with contextlib.suppress(KeyError):
                    self[name] = self[name]

    def __missing__(self, name: str) -> Value:
        if not self._codes or name.startswith("__"):
            raise KeyError(name)
        if hasattr(builtins, name):
            remote = self._session.request("get", name, arguments=([], {}))
            if remote is ABSENT or self._program_names() != {name}:
                return self.setdefault(name, getattr(builtins, name))
            self._session.answers += not isinstance(remote, Remote)
            return remote
        if name in sys.stdlib_module_names and not any(_loads_bare(c, name) for c in self._codes):
            return self.setdefault(name, __import__(name))
        value = self._session.request_value("get", name)
        if value is ABSENT:
            raise KeyError(name)
        return value

    def _program_names(self) -> set[str]:
        """Returns names that the tests load and do not define; built-ins only as a last resort."""
        steps = [step for code in self._codes for step in dis.get_instructions(code)]
        loaded = {step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
        stored = {step.argval for step in steps if step.opname in ("STORE_GLOBAL", "STORE_NAME")}
        unknown = {name for name in loaded - stored if name not in self}
        others = {name for name in unknown if not hasattr(builtins, name)}
        return others or {name for name in unknown if _is_function(getattr(builtins, name))}


def _is_function(value: Value) -> bool:
    return callable(value) and not (isinstance(value, type) and issubclass(value, BaseException))


def _loads_bare(code: CodeType, name: str) -> bool:
    """Whether the name is loaded without its attributes: `calendar(3)`, not `calendar.month(3)`."""
    previous_name, is_loaded = "", False
    for step in dis.get_instructions(code):
        if previous_name == name:
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                return False
            is_loaded = True
        previous_name = step.argval if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ""
    return is_loaded
