"""Runs in the program's box: loads the program, then answers the judge's requests until it hangs up.

Sent as text, so it imports nothing of ours and as little else as possible: a program waits for it.
All of this is in the program's reach, and nothing here decides anything: the judge reads plain data.
"""

from __future__ import annotations

import marshal
import os
import sys
from _json import encode_basestring_ascii, make_encoder

TYPE_CHECKING = False  # importing typing takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hone.sandbox.judging.plain_data import Table, Value

_ATOMS = frozenset({type(None), bool, float, str})
_FLAT = _ATOMS | {int}
_LARGE = 1 << 4096  # larger integers travel as hexadecimal text
_DEEPER = 64  # frames of ours below the program's; its recursion limit stays what it expects
_TAGS: dict[type, str] = {tuple: "t", set: "s", frozenset: "f"}
_NAMED = {
    ("collections", "deque"): "q",
    ("collections", "Counter"): "C",
    ("collections", "OrderedDict"): "O",
    ("collections", "defaultdict"): "D",
    ("decimal", "Decimal"): "N",
    ("fractions", "Fraction"): "F",
    ("re", "Match"): "M",
}
_BASES: dict[type, Callable[[Value], Value]] = {  # a subclass's instance goes as what it is made of
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: bytes,
    list: list,
    tuple: tuple,
    dict: dict,
    set: set,
    frozenset: frozenset,
}
_VIEWS: dict[type, str] = {type({}.keys()): "K", type({}.items()): "I", type({}.values()): "V"}
_to_json = make_encoder(None, repr, encode_basestring_ascii, None, ":", ",", False, False, True)


class Answers:
    """One conversation: the program's names, and its objects that the judge holds by number."""

    def __init__(self, channel: int, scope: dict[str, Value], shared: frozenset[str]) -> None:
        self.scope, self.shared = scope, shared
        self.handles: list[Value] = []
        self._channel = channel

    # ---- messages ----

    def receive(self) -> tuple[tuple[Value, ...], bytes]:
        """A request and its bytes. Ends the process when the judge has hung up."""
        data = self._read(int.from_bytes(self._read(8), "big"))
        return marshal.loads(data), data

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
        message = [kind, value, encoder.finish(), after]
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
        self.send("x", [names, message], [], Encoder(self, {}, True))

    def serve(self) -> None:
        while True:
            self.answer(*self.receive())

    def answer(self, request: tuple[Value, ...], data: bytes) -> None:
        try:
            decoder = Decoder(self, request[1])
            value, arguments = self._do(request[0], decoder, request[2:])
            for fast in (True, False):
                encoder = Encoder(self, decoder.numbers, fast)
                try:
                    after = self._after(encoder, arguments, request, data)
                    self.send("v", encoder.encode(value), after, encoder)
                    return
                except ValueError:  # a large integer in a plain list
                    if not fast:
                        raise
        except BaseException as error:  # whatever the program raised is the answer
            self.send_error(error)

    def _do(self, verb: str, decoder: Decoder, words: tuple[Value, ...]) -> tuple[Value, Value]:
        """The value asked for, and the arguments that may have been changed."""
        if verb == "get":
            if words[0] not in self.scope:
                return Absent, None
            return self.scope[words[0]], None
        target = self.handles[words[0]]
        if verb == "call":
            arguments = decoder.decode(words[1]), decoder.decode(words[2])
            return target(*arguments[0], **arguments[1]), arguments
        if verb == "attribute":
            return getattr(target, words[1]), None
        if verb == "assign":
            setattr(target, words[1], decoder.decode(words[2])[0])
            return None, None
        if verb == "method":
            if not hasattr(target, words[1]):
                raise TypeError(f"{type(target).__name__!r} object has no {words[1]}")
            return getattr(target, words[1])(*decoder.decode(words[2])), None
        if verb == "next":
            items = []
            for item in target:
                items.append(item)
                if len(items) == words[1]:
                    return [items, False], None
            return [items, True], None
        raise LookupError(verb)

    def _after(
        self, encoder: Encoder, arguments: Value, request: tuple[Value, ...], data: bytes
    ) -> list[Value]:
        """[place, new value] of every argument that is not what it was."""
        if arguments is None:
            return []
        places = [*enumerate(arguments[0]), *arguments[1].items()]
        changeable = [(place, now) for place, now in places if type(now) not in _FLAT]
        if not changeable:
            return []
        before: Value = None
        if not request[1]:
            _, _, _, first, named = marshal.loads(data)
            before = {**dict(enumerate(first)), **named}
        changed = []
        for place, now in changeable:
            if before is None or type(now) is not type(before[place]) or now != before[place]:
                changed.append([place, encoder.encode(now)])
        return changed

    def call_back(self, number: int) -> Callable[..., Value]:
        """A function of the tests, called where it lives."""

        def callback(*arguments: Value, **named: Value) -> Value:
            encoder = Encoder(self, {}, False)
            self.send(
                "b", [number, encoder.encode([*arguments]), encoder.encode(named)], [], encoder
            )
            while True:
                request, data = self.receive()
                if request[0] == "return":
                    return Decoder(self, request[1]).decode(request[2])
                if request[0] == "raise":
                    raise getattr(sys.modules["builtins"], request[2], Exception)(request[3])
                self.answer(request, data)

        return callback


class Absent:
    """Says that the program has no such name."""


class Encoder:
    """Values of one answer as JSON with tags; objects of shared classes go into a table."""

    def __init__(self, answers: Answers, numbers: dict[int, tuple[int, Value]], fast: bool) -> None:
        self._answers = answers
        self._numbers = dict(numbers)  # id → (number, object)
        self._queue = list(numbers.values())
        self._fast = fast

    def encode(self, value: Value) -> Value:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is int:
            return value if -_LARGE < value < _LARGE else {"i": hex(value)}
        if kind is list:
            return self._items(value)
        if kind in _TAGS:
            return {_TAGS[kind]: self._items([*value])}
        if kind is dict:
            return {"d": self._pairs(value)}
        return self._rare(value, kind)

    def _items(self, items: list[Value]) -> list[Value]:
        if self._fast and _FLAT.issuperset(map(type, items)):
            return items
        return [self.encode(item) for item in items]

    def _pairs(self, value: dict[Value, Value]) -> list[Value]:
        return self._items([part for pair in value.items() for part in pair])

    def _rare(self, value: Value, kind: type) -> Value:
        if kind is bytes or kind is bytearray:
            return {"b" if kind is bytes else "B": value.decode("latin-1")}
        if kind is range:
            return {"r": self._items([value.start, value.stop, value.step])}
        if kind is complex:
            return {"c": [value.real, value.imag]}
        if kind in _VIEWS:
            return {_VIEWS[kind]: self._items([*value])}
        tag = _NAMED.get((kind.__module__, kind.__name__))
        if tag == "q":
            return {"q": [self._items([*value]), value.maxlen]}
        if tag == "N":
            return {"N": str(value)}
        if tag == "F":
            return {"F": self._items([value.numerator, value.denominator])}
        if tag == "M":
            return {"M": self._items([value.group(), *value.span()])}
        if tag is not None:
            return {tag: self._pairs(value)}
        if value is Absent:
            return {"-": None}
        if value is Ellipsis:
            return {".": None}
        if kind.__name__ in self._answers.shared and hasattr(value, "__dict__"):
            return self._shared(value, kind.__name__)
        for base, plain in _BASES.items():
            if isinstance(value, base):
                return self.encode(plain(value))
        return self._handle(value, kind)

    def _shared(self, value: Value, name: str) -> Value:
        if id(value) not in self._numbers:
            entry = (len(self._numbers), value)
            self._numbers[id(value)] = entry
            self._queue.append(entry)
        return {"o": [self._numbers[id(value)][0], name]}

    def _handle(self, value: Value, kind: type) -> Value:
        self._answers.handles.append(value)
        number = len(self._answers.handles) - 1
        if isinstance(value, type) and issubclass(value, BaseException):
            return {"e": [base.__name__ for base in value.__mro__]}
        if hasattr(kind, "__next__") and hasattr(kind, "__iter__"):
            self._answers.handles[number] = iter(value)
            return {"g": number}
        return {"h": number}

    def finish(self) -> list[Value]:
        """The table of shared objects: [number, class, attributes], found while it is written."""
        table = []
        for number, value in self._queue:  # grows meanwhile
            table.append([number, type(value).__name__, self._pairs(value.__dict__)])
        return table


class Decoder:
    """A request's values: native ones as they are, others behind (..., tag, content)."""

    def __init__(self, answers: Answers, table: Table) -> None:
        self._answers = answers
        self.numbers: dict[int, tuple[int, Value]] = {}
        self._objects = []
        for number, (name, _) in enumerate(table):
            shared = answers.scope[name]
            self._objects.append(shared.__new__(shared))
            self.numbers[id(self._objects[-1])] = (number, self._objects[-1])
        for number, (_, attributes) in enumerate(table):
            for name, value in attributes.items():
                setattr(self._objects[number], name, self.decode(value))

    def decode(self, value: Value) -> Value:
        kind = type(value)
        if kind is list:
            if not _FLAT.issuperset(map(type, value)):
                value[:] = [self.decode(item) for item in value]
        elif kind is tuple:
            if value[:1] == (...,):
                return self._special(*value[1:])
            if not _FLAT.issuperset(map(type, value)):
                return tuple([self.decode(item) for item in value])
        elif kind is dict:
            for key, item in value.items():
                value[key] = self.decode(item)
        return value

    def _special(self, tag: str, content: Value = None, extra: Value = None) -> Value:
        if tag == "h":
            return self._answers.handles[content]
        if tag == "o":
            return self._objects[content]
        if tag == "b":
            return self._answers.call_back(content)
        if tag == "builtin":
            return getattr(sys.modules["builtins"], content)
        if tag == ".":
            return ...
        if tag == "B":
            return bytearray(content)
        if tag == "r":
            return range(*content)
        return _collection(tag, self.decode(content), extra)


def _collection(tag: str, content: Value, extra: Value) -> Value:
    import collections

    if tag == "q":
        return collections.deque(content, extra)
    if tag == "C":
        return collections.Counter(content)
    if tag == "O":
        return collections.OrderedDict(content)
    if tag == "D":
        return collections.defaultdict(extra and getattr(sys.modules["builtins"], extra), content)
    if tag == "N":
        from decimal import Decimal

        return Decimal(content)
    from fractions import Fraction

    return Fraction(*content)


def classes_of(scope: dict[str, Value]) -> Iterator[str]:
    """Names of the classes that the source in this scope has defined."""
    for name, value in scope.items():
        if isinstance(value, type) and value.__module__ == "__main__" and value.__name__ == name:
            yield name


def main(program: str, preamble: str) -> None:
    """Load the program behind the preamble as `__main__`, and answer."""
    channel = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    scope = sys.modules["__main__"].__dict__
    for name in [name for name in scope if not name.startswith("__")]:
        del scope[name]
    sys.setrecursionlimit(sys.getrecursionlimit() + _DEEPER)
    answers = Answers(channel, scope, frozenset())
    try:
        if preamble:
            exec(compile(preamble, "preamble.py", "exec", dont_inherit=True), scope)
            answers.shared = frozenset(classes_of(scope))
        exec(compile(program, "main.py", "exec", dont_inherit=True), scope)
    except BaseException as error:  # the judge is told; it decides
        answers.send_error(error)
    else:
        answers.send("v", None, [], Encoder(answers, {}, True))
    answers.serve()
