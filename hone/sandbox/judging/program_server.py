"""The server in the program's box: loads the program, then answers requests of the judge.

This file imports few modules, because the imports delay every program, and nothing of hone, which the box
does not contain. The program can tamper with this code, so only the judge decides.
"""

from __future__ import annotations

import marshal
import os
import sys
from _json import encode_basestring_ascii, make_encoder

TYPE_CHECKING = False  # the import of typing takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Callable

    from hone.sandbox.judging.plain_data import Value

_VALUE, _EXCEPTION, _CALLBACK = "v", "x", "b"  # the kinds of messages, as in plain_data.py
_SCALAR_TYPES = frozenset({type(None), bool, int, float, str})
_SlotType = type(type(lambda: None).__dict__["__globals__"])  # types.MemberDescriptorType
_LARGE_INT = 1 << 4096  # larger integers are sent as hexadecimal text
_SERVER_FRAMES = 64  # stack frames of this file, by which the recursion limit is raised
# An instance of a subclass is sent as its base type.
_TO_BASE_TYPE: dict[type, Callable[[Value], Value]] = {
    **{base: base for base in (bytes, list, tuple, dict, set, frozenset)},
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}


def _flatten_items(value: dict[Value, Value]) -> list[Value]:
    """Returns the list [key, value, key, value, …] of a dict."""
    return [item for pair in value.items() for item in pair]


def _attributes(value: Value) -> dict[str, Value]:
    """Returns the attributes of an object, also of its slots."""
    slot_names = [
        name
        for base in type(value).__mro__
        for name, member in vars(base).items()
        if type(member) is _SlotType and not name.startswith("__")
    ]
    slots = {name: getattr(value, name) for name in slot_names if hasattr(value, name)}
    return {**slots, **getattr(value, "__dict__", {})}


_ENCODINGS: dict[type | tuple[str, str], tuple[str, Callable[[Value], Value]]] = {
    tuple: ("t", list),
    set: ("s", list),
    frozenset: ("f", list),
    dict: ("d", _flatten_items),
    bytes: ("b", lambda value: value.decode("latin-1")),
    bytearray: ("B", lambda value: value.decode("latin-1")),
    range: ("r", lambda value: [value.start, value.stop, value.step]),
    complex: ("c", lambda value: [value.real, value.imag]),
    type({}.keys()): ("K", list),
    type({}.items()): ("I", lambda value: [item for pair in value for item in pair]),
    type({}.values()): ("V", list),
    type(...): (".", lambda _: None),
    ("collections", "deque"): ("q", lambda value: [[*value], value.maxlen]),
    ("collections", "Counter"): ("C", _flatten_items),
    ("collections", "OrderedDict"): ("O", _flatten_items),
    ("collections", "defaultdict"): ("D", _flatten_items),
    ("decimal", "Decimal"): ("N", str),
    ("fractions", "Fraction"): ("F", lambda value: [value.numerator, value.denominator]),
    ("re", "Match"): ("M", lambda value: [value.group(), *value.span()]),
    ("datetime", "date"): ("Y", lambda value: value.isoformat()),
    ("datetime", "time"): ("H", lambda value: value.isoformat()),
    ("datetime", "datetime"): ("T", lambda value: value.isoformat()),
    ("datetime", "timedelta"): ("U", lambda value: [value.days, value.seconds, value.microseconds]),
}
"""By type: the tag, and the function that converts a value to plain data.

A key is a type, or the module and name of a type that this file does not import.
"""
_to_json = make_encoder(None, repr, encode_basestring_ascii, None, ":", ",", False, False, True)


class Request:
    """A request of the judge: the fields, and the instances of shared classes."""

    def __init__(self, session: ProgramSession, data: bytes) -> None:
        self.shared_objects: list[Value] = []
        self.data = data
        self._session = session
        self.fields = marshal.loads(data[1:]) if data[:1] == b"m" else self._unpickle()

    def _unpickle(self) -> Value:
        import io
        from _pickle import Unpickler

        request = self

        class RequestUnpickler(Unpickler):
            def find_class(self, module: str, name: str) -> Value:
                return request._resolve if name == "resolve" else super().find_class(module, name)

        unpickler = RequestUnpickler(io.BytesIO(self.data[1:]))
        fields = unpickler.load()
        for instance in self.shared_objects:  # load() may append
            for name, value in unpickler.load().items():
                object.__setattr__(instance, name, value)  # also of a frozen dataclass
        return fields

    def _resolve(self, kind: str, key: Value) -> Value:
        """Returns the object for a placeholder of `plain_data.resolve`."""
        if kind == "handle":
            return self._session.handles[key]
        if kind == "callback":
            return self._session.make_callback(key)
        if kind == "member":
            name, value = key
            return self._session.scope[name](value)
        if kind == "named tuple":
            name, items = key
            return tuple.__new__(self._session.scope[name], items)
        shared_class = self._session.scope[key]
        self.shared_objects.append(shared_class.__new__(shared_class))
        return self.shared_objects[-1]


class ProgramSession:
    """The connection to the judge, the program's names, and the objects that the judge knows by handle."""

    def __init__(self, channel: int, scope: dict[str, Value]) -> None:
        self.scope = scope  # the program's global names
        self.shared_classes: frozenset[str] = frozenset()
        """Names of the classes defined by the preamble, the code that both boxes run first."""
        self.handles: list[Value] = []
        self._channel = channel

    def receive(self) -> Request:
        """Returns the next request; ends the process if the judge has disconnected."""
        return Request(self, self._read(int.from_bytes(self._read(8), "big")))

    def _read(self, size: int) -> bytes:
        chunks = []
        while size:
            chunk = os.read(self._channel, min(size, 1 << 20))
            if not chunk:
                os._exit(0)
            chunks.append(chunk)
            size -= len(chunk)
        return b"".join(chunks)

    def send(self, kind: str, value: Value, changes: list[Value], encoder: Encoder) -> None:
        message = [kind, value, encoder.object_states(), changes]
        data = "".join(_to_json(message, 0)).encode()
        view = memoryview(len(data).to_bytes(8, "big") + data)
        while view:
            view = view[os.write(self._channel, view) :]

    def send_error(self, error: BaseException) -> None:
        names = [base.__name__ for base in type(error).__mro__]
        try:
            message = str(error)[:2000]
        except Exception:
            message = ""
        self.send(_EXCEPTION, [names, message], [], Encoder(self, [], True))

    def answer(self, request: Request) -> None:
        try:
            value, arguments = self._execute(*request.fields)
            for skip_list_check in (True, False):
                encoder = Encoder(self, request.shared_objects, skip_list_check)
                try:
                    changes = self._changed_arguments(encoder, arguments, request)
                    self.send(_VALUE, encoder.encode(value), changes, encoder)
                    return
                except ValueError:  # an unchecked list contains a large integer
                    if not skip_list_check:
                        raise
        except BaseException as error:  # the judge gets every exception of the program
            self.send_error(error)

    def _execute(self, operation: str, key: Value, *values: Value) -> tuple[Value, Value]:
        """Returns the value of an operation, and of a call the arguments, which the program may change."""
        if operation == "get":
            return self.scope.get(key, Absent), None
        target = self.handles[key]
        if operation == "call":
            return target(*values[0], **values[1]), values
        if operation == "attribute":
            return getattr(target, values[0]), None
        if operation == "assign":
            setattr(target, values[0], values[1][0])
            return None, None
        if operation == "method":
            if not hasattr(target, values[0]):
                raise TypeError(f"{type(target).__name__!r} object has no {values[0]}")
            return getattr(target, values[0])(*values[1]), None
        assert operation == "next"
        items = []
        for item in target:
            items.append(item)
            if len(items) == values[0]:
                return [items, False], None
        return [items, True], None

    @staticmethod
    def _changed_arguments(encoder: Encoder, arguments: Value, request: Request) -> list[Value]:
        """Returns [position or name, new value] for the arguments that the call may have changed."""
        if arguments is None:
            return []
        items = [*enumerate(arguments[0]), *arguments[1].items()]
        changed = [(key, value) for key, value in items if type(value) not in _SCALAR_TYPES]
        if changed and request.data[:1] == b"m":  # marshal gives a second copy for a comparison
            args, kwargs = marshal.loads(request.data[1:])[2:]
            old_values = {**dict(enumerate(args)), **kwargs}
            changed = [(key, value) for key, value in changed if value != old_values[key]]
        return [[key, encoder.encode(value)] for key, value in changed]

    def make_callback(self, callback_id: int) -> Callable[..., Value]:
        """Returns a function that calls the tests' function with this id, in the judge's box."""

        def callback(*args: Value, **kwargs: Value) -> Value:
            encoder = Encoder(self, [], False)
            content = [callback_id, encoder.encode([*args]), encoder.encode(kwargs)]
            self.send(_CALLBACK, content, [], encoder)
            while True:
                request = self.receive()
                operation, *values = request.fields
                if operation == "return":
                    return values[0]
                if operation == "raise":
                    raise getattr(sys.modules["builtins"], values[0], Exception)(values[1])
                self.answer(request)

        return callback


class Absent:
    """The answer for a name that the program does not define."""


class Encoder:
    """Encodes the values of one answer as tagged JSON.

    With `skip_list_check`, lists of scalars are not searched for large integers, for which `send` raises
    ValueError.
    """

    def __init__(
        self, session: ProgramSession, shared_objects: list[Value], skip_list_check: bool
    ) -> None:
        self._session = session
        self._skip_list_check = skip_list_check
        self._shared_objects = [*shared_objects]
        self._object_ids = {id(value): object_id for object_id, value in enumerate(shared_objects)}

    def encode(self, value: Value) -> Value:
        value_type = type(value)
        if value_type is int:
            return value if -_LARGE_INT < value < _LARGE_INT else {"i": hex(value)}
        if value_type in _SCALAR_TYPES:
            return value
        if value_type is list:
            if self._skip_list_check and _SCALAR_TYPES.issuperset(map(type, value)):
                return value
            return [self.encode(item) for item in value]
        full_name = (value_type.__module__, value_type.__name__)
        encoding = _ENCODINGS.get(value_type) or _ENCODINGS.get(full_name)
        if encoding is not None:
            tag, to_plain = encoding
            return {tag: self.encode(to_plain(value))}
        if value is Absent:
            return {"-": None}
        if value_type.__name__ in self._session.shared_classes:
            if hasattr(value_type, "__members__"):
                return {"m": [value_type.__name__, self.encode(value.value)]}
            if hasattr(value_type, "_fields"):
                return {"n": [value_type.__name__, self.encode([*value])]}
            if not isinstance(value, tuple(_TO_BASE_TYPE)):
                return self._add_shared_object(value)
        for base, convert in _TO_BASE_TYPE.items():
            if isinstance(value, base):
                return self.encode(convert(value))
        return self._add_handle(value, value_type)

    def _add_shared_object(self, value: Value) -> Value:
        object_id = self._object_ids.setdefault(id(value), len(self._shared_objects))
        if object_id == len(self._shared_objects):
            self._shared_objects.append(value)
        return {"o": [object_id, type(value).__name__]}

    def _add_handle(self, value: Value, value_type: type) -> Value:
        self._session.handles.append(value)
        handle = len(self._session.handles) - 1
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"e": [base.__name__ for base in value.__mro__]}
        if hasattr(value_type, "__next__") and hasattr(value_type, "__iter__"):
            self._session.handles[handle] = iter(value)
            return {"g": handle}
        return {"h": handle}

    def object_states(self) -> list[Value]:
        """Returns the instances of shared classes as [object id, class name, attributes]."""
        states = []
        for object_id, value in enumerate(self._shared_objects):  # encode() may append
            states.append(
                [object_id, type(value).__name__, self.encode(_flatten_items(_attributes(value)))]
            )
        return states


def main(program: str, preamble: str) -> None:
    """Runs the preamble and the program as `__main__`, then answers the judge's requests."""
    channel = os.dup(0)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    scope = sys.modules["__main__"].__dict__
    for name in [name for name in scope if not name.startswith("__")]:
        del scope[name]
    sys.setrecursionlimit(sys.getrecursionlimit() + _SERVER_FRAMES)
    session = ProgramSession(channel, scope)
    try:
        if preamble:
            exec(compile(preamble, "preamble.py", "exec", dont_inherit=True), scope)
            session.shared_classes = frozenset(
                name
                for name, value in scope.items()
                if isinstance(value, type)
                and (value.__module__, value.__name__) == ("__main__", name)
            )
        exec(compile(program, "main.py", "exec", dont_inherit=True), scope)
    except BaseException as error:  # the judge decides what the error means
        session.send_error(error)
    else:
        session.send(_VALUE, None, [], Encoder(session, [], True))
    while True:
        session.answer(session.receive())
