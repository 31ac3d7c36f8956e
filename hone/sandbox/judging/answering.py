"""Runs in the program's box: loads the program, then answers the judge until it disconnects.

This file is sent as text and imports nothing of ours and few other modules, because startup delays every
program. The program can tamper with this code, so it decides nothing: the judge reads plain data.
"""

from __future__ import annotations

import marshal
import os
import sys
from _json import encode_basestring_ascii, make_encoder

TYPE_CHECKING = False  # importing typing takes longer than most programs run
if TYPE_CHECKING:
    from collections.abc import Callable

    from hone.sandbox.judging.plain_data import Value

_FLAT = frozenset({type(None), bool, int, float, str})
_LARGE = 1 << 4096  # larger integers are sent as hexadecimal text
_OWN_FRAMES = 64  # stack frames of this file, added to the recursion limit that the program expects
_EXACT: dict[type, Callable[[Value], Value]] = {  # subclass instances are sent as their base type
    **{base: base for base in (bytes, list, tuple, dict, set, frozenset)},
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
}


def _pairs(value: dict[Value, Value]) -> list[Value]:
    return [part for pair in value.items() for part in pair]


_PARTS: dict[type | tuple[str, str], tuple[str, Callable[[Value], Value]]] = {
    tuple: ("t", list),
    set: ("s", list),
    frozenset: ("f", list),
    dict: ("d", _pairs),
    bytes: ("b", lambda value: value.decode("latin-1")),
    bytearray: ("B", lambda value: value.decode("latin-1")),
    range: ("r", lambda value: [value.start, value.stop, value.step]),
    complex: ("c", lambda value: [value.real, value.imag]),
    type({}.keys()): ("K", list),
    type({}.items()): ("I", lambda value: [part for pair in value for part in pair]),
    type({}.values()): ("V", list),
    type(...): (".", lambda _: None),
    ("collections", "deque"): ("q", lambda value: [[*value], value.maxlen]),
    ("collections", "Counter"): ("C", _pairs),
    ("collections", "OrderedDict"): ("O", _pairs),
    ("collections", "defaultdict"): ("D", _pairs),
    ("decimal", "Decimal"): ("N", str),
    ("fractions", "Fraction"): ("F", lambda value: [value.numerator, value.denominator]),
    ("re", "Match"): ("M", lambda value: [value.group(), *value.span()]),
}
"""Type (by name where it must not be imported here) → its tag, and a function to its plain data."""
_to_json = make_encoder(None, repr, encode_basestring_ascii, None, ":", ",", False, False, True)


class Request:
    """A decoded request of the judge: its words, and its shared objects by number."""

    def __init__(self, answers: Answers, data: bytes) -> None:
        self.objects: list[Value] = []
        self.data = data
        self._answers = answers
        self.words = marshal.loads(data[1:]) if data[:1] == b"m" else self._unpickle()

    def _unpickle(self) -> Value:
        import io
        from _pickle import Unpickler

        request = self

        class Reader(Unpickler):
            def find_class(self, module: str, name: str) -> Value:
                return request._resolve if name == "resolve" else super().find_class(module, name)

        reader = Reader(io.BytesIO(self.data[1:]))
        words = reader.load()
        for shared in self.objects:  # load() may append
            for name, value in reader.load().items():
                setattr(shared, name, value)
        return words

    def _resolve(self, kind: str, key: Value) -> Value:
        if kind == "handle":
            return self._answers.handles[key]
        if kind == "callback":
            return self._answers.call_back(key)
        shared = self._answers.scope[key]
        self.objects.append(shared.__new__(shared))
        return self.objects[-1]


class Answers:
    """One session: the program's names, and the objects that the judge refers to by number."""

    def __init__(self, channel: int, scope: dict[str, Value]) -> None:
        self.scope = scope
        self.shared: frozenset[str] = frozenset()  # classes that the tests also define
        self.handles: list[Value] = []
        self._channel = channel

    def receive(self) -> Request:
        """Returns the next request; ends the process when the judge has disconnected."""
        return Request(self, self._read(int.from_bytes(self._read(8), "big")))

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._channel, min(size, 1 << 20))
            if not part:
                os._exit(0)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def send(self, kind: str, value: Value, after: list[Value], encoder: Encoder) -> None:
        message = [kind, value, encoder.table(), after]
        data = "".join(_to_json(message, 0)).encode()
        view = memoryview(len(data).to_bytes(8, "big") + data)
        while view:
            view = view[os.write(self._channel, view) :]

    def send_error(self, error: BaseException) -> None:
        names = [kind.__name__ for kind in type(error).__mro__]
        try:
            message = str(error)[:2000]
        except Exception:
            message = ""
        self.send("x", [names, message], [], Encoder(self, [], True))

    def answer(self, request: Request) -> None:
        try:
            value, arguments = self._do(*request.words)
            for fast in (True, False):
                encoder = Encoder(self, request.objects, fast)
                try:
                    after = self._changed(encoder, arguments, request)
                    self.send("v", encoder.encode(value), after, encoder)
                    return
                except ValueError:  # a large integer in a plain list
                    if not fast:
                        raise
        except BaseException as error:  # any exception of the program is sent to the judge
            self.send_error(error)

    def _do(self, verb: str, key: Value, *words: Value) -> tuple[Value, Value]:
        """Returns the requested value and the arguments that the program may have changed."""
        if verb == "get":
            return self.scope.get(key, Absent), None
        target = self.handles[key]
        if verb == "call":
            return target(*words[0], **words[1]), words
        if verb == "attribute":
            return getattr(target, words[0]), None
        if verb == "assign":
            setattr(target, words[0], words[1][0])
            return None, None
        if verb == "method":
            if not hasattr(target, words[0]):
                raise TypeError(f"{type(target).__name__!r} object has no {words[0]}")
            return getattr(target, words[0])(*words[1]), None
        assert verb == "next"
        items = []
        for item in target:
            items.append(item)
            if len(items) == words[0]:
                return [items, False], None
        return [items, True], None

    @staticmethod
    def _changed(encoder: Encoder, arguments: Value, request: Request) -> list[Value]:
        """Returns [place, new value] for every argument that the call changed."""
        if arguments is None:
            return []
        places = [*enumerate(arguments[0]), *arguments[1].items()]
        mutable = [(place, now) for place, now in places if type(now) not in _FLAT]
        if mutable and request.data[:1] == b"m":
            first, named = marshal.loads(request.data[1:])[2:]
            before = {**dict(enumerate(first)), **named}
            mutable = [(place, now) for place, now in mutable if now != before[place]]
        return [[place, encoder.encode(now)] for place, now in mutable]

    def call_back(self, number: int) -> Callable[..., Value]:
        """Returns a function that calls a function of the tests in the judge's box."""

        def callback(*arguments: Value, **named: Value) -> Value:
            encoder = Encoder(self, [], False)
            content = [number, encoder.encode([*arguments]), encoder.encode(named)]
            self.send("b", content, [], encoder)
            while True:
                request = self.receive()
                verb, *words = request.words
                if verb == "return":
                    return words[0]
                if verb == "raise":
                    raise getattr(sys.modules["builtins"], words[0], Exception)(words[1])
                self.answer(request)

        return callback


class Absent:
    """Marks a name that the program does not define."""


class Encoder:
    """Encodes the values of one answer as tagged JSON; objects of shared classes go into a table."""

    def __init__(self, answers: Answers, objects: list[Value], fast: bool) -> None:
        self._answers = answers
        self._fast = fast
        self._objects = [*objects]
        self._numbers = {id(value): number for number, value in enumerate(objects)}

    def encode(self, value: Value) -> Value:
        kind = type(value)
        if kind is int:
            return value if -_LARGE < value < _LARGE else {"i": hex(value)}
        if kind in _FLAT:
            return value
        if kind is list:
            if self._fast and _FLAT.issuperset(map(type, value)):
                return value
            return [self.encode(item) for item in value]
        parts = _PARTS.get(kind) or _PARTS.get((kind.__module__, kind.__name__))
        if parts is not None:
            return {parts[0]: self.encode(parts[1](value))}
        if value is Absent:
            return {"-": None}
        if kind.__name__ in self._answers.shared and hasattr(value, "__dict__"):
            number = self._numbers.setdefault(id(value), len(self._objects))
            if number == len(self._objects):
                self._objects.append(value)
            return {"o": [number, kind.__name__]}
        for base, exact in _EXACT.items():
            if isinstance(value, base):
                return self.encode(exact(value))
        return self._handle(value, kind)

    def _handle(self, value: Value, kind: type) -> Value:
        self._answers.handles.append(value)
        number = len(self._answers.handles) - 1
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"e": [base.__name__ for base in value.__mro__]}
        if hasattr(kind, "__next__") and hasattr(kind, "__iter__"):
            self._answers.handles[number] = iter(value)
            return {"g": number}
        return {"h": number}

    def table(self) -> list[Value]:
        """Returns the shared objects as [number, class, attributes]; encoding one may add others."""
        rows = []
        for number, value in enumerate(self._objects):  # encode() may append
            rows.append([number, type(value).__name__, self.encode(_pairs(value.__dict__))])
        return rows


def main(program: str, preamble: str) -> None:
    """Run the preamble and the program as `__main__`, then answer requests."""
    channel = os.dup(0)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    scope = sys.modules["__main__"].__dict__
    for name in [name for name in scope if not name.startswith("__")]:
        del scope[name]
    sys.setrecursionlimit(sys.getrecursionlimit() + _OWN_FRAMES)
    answers = Answers(channel, scope)
    try:
        if preamble:
            exec(compile(preamble, "preamble.py", "exec", dont_inherit=True), scope)
            answers.shared = frozenset(
                name
                for name, value in scope.items()
                if isinstance(value, type)
                and (value.__module__, value.__name__) == ("__main__", name)
            )
        exec(compile(program, "main.py", "exec", dont_inherit=True), scope)
    except BaseException as error:  # the judge receives the error and decides
        answers.send_error(error)
    else:
        answers.send("v", None, [], Encoder(answers, [], True))
    while True:
        answers.answer(answers.receive())
