"""Proxies through which the tests use names, functions and objects of the program's box.

An object of the program never decides what is equal, true or contained: the tests fail if they compare it.
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
    CALLBACK,
    EXCEPTION,
    MAX_ANSWER_BYTES,
    VALUE,
    AnswerReader,
    MalformedAnswer,
    RequestWriter,
    Value,
    update_in_place,
)

# Other operators would show the program the expected value, such as `-` in `abs(f(x) - 3) < 1e-6`.
_FORWARDED_OPERATORS = (
    *("len", "getitem", "setitem", "delitem", "str", "repr", "enter", "exit"),
    *("abs", "neg", "pos", "int", "float", "index", "round"),
)
_FORWARDED_DUNDERS = frozenset({"__name__", "__qualname__"})
_PREDICATE_METHODS = frozenset(
    name
    for kind in (str, bytes, list, dict, set, int, float)
    for name in dir(kind)
    if name.startswith("is") or name in ("startswith", "endswith")
)


class TestsFailed(BaseException):
    """Fails the tests; the judgement fails even if a bare `except` of the tests catches this exception."""

    reason: str | None = None

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        TestsFailed.reason = reason


class Session:
    """The connection to the program's box."""

    def __init__(self, channel: int) -> None:
        # The classes defined by the preamble, the code that both boxes run before the program and the tests.
        self.shared_classes: dict[str, type] = {}
        self.num_plain_answers = 0  # answers that are plain data, not proxies
        self._channel = channel
        self._callbacks: list[Callable[..., Value]] = []
        self._exception_classes: dict[str, type] = {}

    def wait_until_loaded(self) -> None:
        kind, value, _ = self._receive([])
        if kind != VALUE:
            raise TestsFailed(f"the program does not load: {_error_text(value)}")

    def request(
        self, operation: str, *fields: Value, arguments: tuple[list[Value], dict[str, Value]]
    ) -> Value:
        """Sends a request, runs callbacks, and returns the answer or raises the exception of the program."""
        args, kwargs = arguments
        content = (args, kwargs) if operation == "call" else (args,)
        objects = self._send((operation, *fields, *content))
        while True:
            kind, value, changes = self._receive(objects)
            if kind == CALLBACK:
                self._run_callback(value)
                continue
            try:  # the program may have changed arguments of the call
                for key, new_value in changes:
                    local = kwargs[key] if type(key) is str else args[key]
                    update_in_place(local, new_value)
            except (LookupError, TypeError, ValueError):
                raise TestsFailed("the program's box changed an unknown argument") from None
            if kind == EXCEPTION:
                raise self._to_exception(value)
            if kind != VALUE or (value is ABSENT and operation != "get"):
                raise TestsFailed("the program's box sent an invalid value")
            return value

    def request_value(self, operation: str, *fields: Value, arguments: Value = ((), {})) -> Value:
        """Sends a request like `request`, and counts an answer of plain data."""
        value = self.request(operation, *fields, arguments=([*arguments[0]], arguments[1]))
        self.num_plain_answers += not isinstance(value, RemoteObject)
        return value

    def _send(self, request: tuple[Value, ...]) -> list[Value]:
        """Sends a request, and returns the instances of shared classes in the request."""
        writer = RequestWriter(self.shared_classes, _find_handle, self._register_callback)
        data = writer.write(request)
        view = memoryview(len(data).to_bytes(8, "big") + data)
        try:
            while view:
                view = view[os.write(self._channel, view) :]
        except OSError:
            raise TestsFailed("the program ended before the tests did") from None
        return writer.shared_objects

    def _receive(self, sent_objects: list[Value]) -> tuple[str, Value, list[Value]]:
        size = int.from_bytes(self._read(8), "big")
        if size > MAX_ANSWER_BYTES:
            raise TestsFailed(f"an answer has {size} bytes; at most {MAX_ANSWER_BYTES} are allowed")
        try:
            data = self._read(size)
            reader = AnswerReader(
                self.shared_classes, sent_objects, self._make_proxy, self._make_exception_class
            )
            return reader.read(data)
        except MalformedAnswer as error:
            raise TestsFailed(f"the program's box sent a malformed answer: {error}") from None

    def _read(self, size: int) -> bytes:
        chunks = []
        while size:
            try:
                chunk = os.read(self._channel, min(size, 1 << 20))
            except OSError:
                chunk = b""
            if not chunk:
                raise TestsFailed("the program ended before the tests did")
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)

    def _make_proxy(self, kind: str, handle: int) -> RemoteObject:
        return RemoteIterator(self, handle) if kind == "iterator" else RemoteObject(self, handle)

    def _make_exception_class(self, names: list[str]) -> type:
        """Returns a class for an exception of the program; `names` are its class and all bases."""
        base = _builtin_exception(names)
        if names and names[0] != base.__name__ and names[0] not in self._exception_classes:
            self._exception_classes[names[0]] = type(names[0], (base,), {})
        return self._exception_classes.get(names[0], base) if names else base

    def _to_exception(self, value: Value) -> Exception:
        """Returns the local exception for an error of the program."""
        names, message = _error_parts(value)
        if "Exception" not in names:  # SystemExit, KeyboardInterrupt, GeneratorExit
            raise TestsFailed(f"the program raised {_error_text(value)}")
        try:
            error = self._make_exception_class(names)(message)
        except TypeError:  # UnicodeDecodeError, for example, needs more than a message
            error = ValueError(message)
        return error if isinstance(error, Exception) else RuntimeError(message)

    def _register_callback(self, function: Callable[..., Value]) -> int:
        self._callbacks.append(function)
        return len(self._callbacks) - 1

    def _run_callback(self, value: Value) -> None:
        """Runs a function of the tests that the program called, and sends the result."""
        try:
            callback_id, args, kwargs = value
            function = self._callbacks[callback_id]
        except (TypeError, ValueError, LookupError):
            raise TestsFailed("the program's box called an unknown function") from None
        try:
            self._send(("return", function(*args, **kwargs)))
        except Exception as error:
            self._send(("raise", type(error).__name__, str(error)))


class RemoteObject:
    """The proxy of a function, class or object of the program."""

    __slots__ = ("_handle", "_session")

    def __init__(self, session: Session, handle: int) -> None:
        object.__setattr__(self, "_session", session)
        object.__setattr__(self, "_handle", handle)

    def __call__(self, *args: Value, **kwargs: Value) -> Value:
        return self._session.request_value("call", self._handle, arguments=(args, kwargs))

    def __getattr__(self, name: str) -> Value:
        if name.startswith("__") and name.endswith("__") and name not in _FORWARDED_DUNDERS:
            raise AttributeError(name)
        if name in _PREDICATE_METHODS:  # only plain data may answer these methods
            self._fail_comparison()
        return self._session.request_value("attribute", self._handle, name)

    def __setattr__(self, name: str, value: Value) -> None:
        self._session.request("assign", self._handle, name, arguments=([value], {}))

    def __iter__(self) -> Iterator[Value]:
        return iter(self._session.request_value("method", self._handle, "__iter__"))

    def _fail_comparison(self, *_: Value) -> NoReturn:
        raise TestsFailed("the tests compare an object of the program that is not plain data")

    def __eq__(self, other: object) -> bool:
        if other is None or self is other:
            return self is other
        return self._fail_comparison()

    def __ne__(self, other: object) -> bool:
        return not self == other

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = _fail_comparison
    __instancecheck__ = __subclasscheck__ = _fail_comparison


def _forwarding_method(name: str) -> Callable[..., Value]:
    def method(self: RemoteObject, *args: Value) -> Value:
        return self._session.request_value("method", self._handle, name, arguments=(args, {}))

    return method


for _name in _FORWARDED_OPERATORS:
    setattr(RemoteObject, f"__{_name}__", _forwarding_method(f"__{_name}__"))


class RemoteIterator(RemoteObject):
    """The proxy of an iterator of the program, which is read in growing chunks."""

    __slots__ = ("_chunk_size", "_is_done", "_items")

    def __init__(self, session: Session, handle: int) -> None:
        super().__init__(session, handle)
        self._set_state([], False, 1)

    def _set_state(self, items: list[Value], is_done: bool, chunk_size: int) -> None:
        state = {"_items": items, "_is_done": is_done, "_chunk_size": chunk_size}
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def __iter__(self) -> Iterator[Value]:
        return self

    def __len__(self) -> int:  # list() calls __len__ and ignores the error
        raise TypeError("an iterator of the program has no len()")

    def __next__(self) -> Value:
        if not self._items and not self._is_done:
            answer = self._session.request_value("next", self._handle, self._chunk_size)
            if type(answer) is not list or len(answer) != 2 or type(answer[0]) is not list:
                raise TestsFailed("the program's box sent invalid items")
            is_done = answer[1] is not False or not answer[0]
            self._set_state(answer[0][::-1], is_done, min(2 * self._chunk_size, 1024))
        if not self._items:
            raise StopIteration
        return self._items.pop()


def _find_handle(value: Value) -> int | None:
    return value._handle if isinstance(value, RemoteObject) else None


def _error_parts(value: Value) -> tuple[list[str], str]:
    if type(value) is list and len(value) == 2 and type(value[0]) is list:
        names, message = value
        if names and all(type(item) is str for item in [*names, message]):
            return names, message
    raise TestsFailed("the program's box sent an invalid error")


def _error_text(value: Value) -> str:
    names, message = _error_parts(value)
    return f"{names[0]}: {message}"[:300]


def _builtin_exception(names: list[str]) -> type:
    """Returns the first built-in exception in `names`.

    StopIteration and StopAsyncIteration become RuntimeError, because they would end a loop of the tests.
    """
    for name in names:
        exception_class = getattr(builtins, name, None)
        if isinstance(exception_class, type) and issubclass(exception_class, Exception):
            is_stop = issubclass(exception_class, (StopIteration, StopAsyncIteration))
            return RuntimeError if is_stop else exception_class
    return Exception


class TestNamespace(dict[str, Value]):
    """The global names of the tests; a name that the tests do not define is a name of the program.

    A built-in name is the program's only if it is the only name that the tests use and do not define:
    `set(f(x)) == {1}` also uses `f`, so `set` is the built-in. The name of a standard module is the
    program's only if the tests use it without an attribute.
    """

    def __init__(self, session: Session, content: dict[str, Value]) -> None:
        super().__init__(content)
        self._session = session
        self._codes: list[CodeType] = []

    def set_code(self, code: CodeType) -> None:
        """Sets the code of the tests, and looks up in advance the names that its class bodies use.

        A lookup in a class body does not call `__missing__`.
        """
        self._codes = [code]
        for outer_code in self._codes:  # the loop appends to this list
            constants = outer_code.co_consts
            self._codes += [constant for constant in constants if isinstance(constant, CodeType)]
        for inner_code in self._codes[1:]:
            is_class_body = not inner_code.co_flags & CO_OPTIMIZED
            if is_class_body:
                for name in inner_code.co_names:
                    with contextlib.suppress(KeyError):
                        self[name] = self[name]

    def __missing__(self, name: str) -> Value:
        if not self._codes or name.startswith("__"):
            raise KeyError(name)
        if hasattr(builtins, name):
            value = self._session.request("get", name, arguments=([], {}))
            if value is ABSENT or self._program_names() != {name}:
                return self.setdefault(name, getattr(builtins, name))
            self._session.num_plain_answers += not isinstance(value, RemoteObject)
            return value
        if name in sys.stdlib_module_names and not any(
            _loads_bare(code, name) for code in self._codes
        ):
            return self.setdefault(name, __import__(name))
        value = self._session.request_value("get", name)
        if value is ABSENT:
            raise KeyError(name)
        return value

    def _program_names(self) -> set[str]:
        """Returns the names that the tests load but do not define.

        Built-in names are returned only if there is no other name.
        """
        instructions = [
            (instruction.opname, instruction.argval)
            for code in self._codes
            for instruction in dis.get_instructions(code)
        ]
        loads, stores = ("LOAD_GLOBAL", "LOAD_NAME"), ("STORE_GLOBAL", "STORE_NAME")
        used_names = {name for opname, name in instructions if opname in loads}
        defined_names = {name for opname, name in instructions if opname in stores}
        undefined_names = {name for name in used_names - defined_names if name not in self}
        program_names = {name for name in undefined_names if not hasattr(builtins, name)}
        if program_names:
            return program_names
        return {name for name in undefined_names if _can_be_replaced(getattr(builtins, name))}


def _can_be_replaced(value: Value) -> bool:
    """Returns whether a built-in is callable and no exception, so that a program may use its name."""
    return callable(value) and not (isinstance(value, type) and issubclass(value, BaseException))


def _loads_bare(code: CodeType, name: str) -> bool:
    """Returns whether code uses a name without an attribute: `calendar(3)`, not `calendar.month(3)`."""
    previous_name, is_loaded = "", False
    for instruction in dis.get_instructions(code):
        if previous_name == name:
            if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                return False
            is_loaded = True
        is_name = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        previous_name = instruction.argval if is_name else ""
    return is_loaded
