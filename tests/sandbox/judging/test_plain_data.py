"""Every answer of the program's box is read as exact plain types, or refused."""

from __future__ import annotations

import collections
import contextlib
import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.sandbox.judging.plain_data import (
    ABSENT,
    AnswerReader,
    MalformedAnswer,
    Match,
    RequestWriter,
    update_in_place,
)
from hone.sandbox.judging.program_server import ProgramSession, Request


class Node:
    """A class that tests and program share."""

    def __init__(self, val: Any = 0) -> None:
        self.val = val

    def total(self) -> Any:
        return self.val


class Handle:
    """A handle of an object in the program's box."""


PLAIN = (
    *(type(None), bool, int, float, str, bytes, bytearray, complex, range, list, tuple, set),
    *(frozenset, dict, collections.deque, collections.Counter, collections.OrderedDict),
    *(collections.defaultdict, Decimal, Fraction, Match, Node, Handle, type(ABSENT), type(...)),
    *(type({}.keys()), type({}.items()), type({}.values()), type),
)


def make_reader(sent_objects: tuple[Any, ...] = ()) -> AnswerReader:
    return AnswerReader(
        {"Node": Node}, [*sent_objects], lambda kind, number: Handle(), lambda names: ValueError
    )


def read(value: Any, object_rows: Any = (), sent_objects: tuple[Any, ...] = ()) -> Any:
    answer = json.dumps(["v", value, [*object_rows], []])
    return make_reader(sent_objects).read(answer.encode())[1]


@pytest.mark.parametrize(
    ("sent", "value"),
    [
        ({"t": [1, {"t": []}]}, (1, ())),
        ({"s": [1, 2]}, {1, 2}),
        ({"d": ["a", 1, {"t": [1]}, 2]}, {"a": 1, (1,): 2}),
        ({"b": "\xff\0"}, b"\xff\0"),
        ({"i": "-0x10"}, -16),
        ({"c": [1.0, -2.0]}, 1 - 2j),
        ({"q": [[1], 3]}, collections.deque([1], 3)),
        ({"F": [1, 3]}, Fraction(1, 3)),
        ("\ud800", "\ud800"),
    ],
)
def test_tags_become_their_types(sent: Any, value: Any) -> None:
    assert read(sent) == value
    assert type(read(sent)) is type(value)


@pytest.mark.parametrize(
    "sent",
    [
        {},
        {"t": 1},
        {"zz": 1},
        {"t": [], "s": []},
        {"s": [[]]},
        {"d": [1]},
        {"d": [[], 1]},
        {"b": "\u0100"},
        {"b": 1},
        {"i": "x"},
        {"i": "0x" + "f" * (1 << 19)},
        {"r": [0, 1, 0]},
        {"r": [0, 1]},
        {"c": ["1", 2.0]},
        {"q": [[], -1]},
        {"I": [[1, 2]]},
        {"F": [1, 0]},
        {"N": "x"},
        {"h": -1},
        {"h": True},
        {"h": "0"},
        {"o": [0, "Other"]},
        {"o": [0]},
        {"e": [1]},
        {"M": []},
    ],
)
def test_tags_with_invalid_content_are_refused(sent: Any) -> None:
    with pytest.raises(MalformedAnswer):
        read(sent)


@pytest.mark.parametrize(
    "data",
    [b"", b"[", b"[" * 100_000, b"9" * 10_000, b"\xff\xfe", b"{}", b"[1,2,3,4]", b'["v",0,0,0]'],
)
def test_invalid_messages_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        make_reader().read(data)


def test_shared_objects_are_filled_and_no_method_is_replaced() -> None:
    node = Node(1)
    row = [0, "Node", ["val", {"o": [1, "Node"]}]]
    assert read({"o": [0, "Node"]}, [row, [1, "Node", ["val", 5]]], (node,)) is node
    assert node.val.val == 5
    for name in ("total", "__class__", "__eq__", "__dict__"):
        with pytest.raises(MalformedAnswer):
            read(None, [[0, "Node", [name, 1]]], (node,))


TAGS = st.sampled_from([*"itsfdbBrcKIVqCODNFMohge-.", "x"])
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TAGS, inner, max_size=2),
    max_leaves=12,
)


def types_of(value: Any) -> set[type]:
    types = {type(value)}
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        for item in value:
            types |= types_of(item)
    return types


@settings(max_examples=50)
@given(ANYTHING, st.lists(st.tuples(st.integers(0, 2), st.just("Node"), ANYTHING), max_size=2))
def test_any_message_is_plain_data_or_refused(value: Any, object_rows: list[Any]) -> None:
    with contextlib.suppress(MalformedAnswer):
        assert types_of(read(value, object_rows)) <= set(PLAIN)


@settings(max_examples=50)
@given(st.binary(max_size=40))
def test_any_bytes_are_refused_or_read(data: bytes) -> None:
    with contextlib.suppress(MalformedAnswer):
        make_reader().read(data)


def send_to_program(value: Any) -> Any:
    """Returns the value that the program's box gets for a value of the tests."""
    session = ProgramSession(0, {"Node": Node})
    session.handles.append("an object of the program")
    writer = RequestWriter(
        {"Node": Node}, lambda v: 0 if type(v) is Handle else None, lambda function: 0
    )
    return Request(session, writer.write(("call", 0, [value], {}))).fields[2][0]


@pytest.mark.parametrize(
    "value",
    [
        [{"a": (1, range(2), None)}, b"x", 1j, ...],
        [collections.deque([1], 3), collections.Counter("aab"), collections.OrderedDict(a=1)],
        [Decimal("0.1"), Fraction(1, 3), bytearray(b"x"), {1, 2}, frozenset({3})],
        [len, int, ValueError],
        (..., "h", 0),
    ],
)
def test_plain_data_of_the_tests_arrives_unchanged(value: Any) -> None:
    assert send_to_program(value) == value
    assert [*map(type, send_to_program(value))] == [*map(type, value)]


def test_a_list_that_occurs_twice_stays_one_list() -> None:
    row: list[Any] = [0]
    for shared in ([row, row], [row, row, Handle()]):
        copy = send_to_program(shared)
        assert copy[0] is copy[1]


def test_objects_and_functions_are_sent_by_number() -> None:
    node = Node(1)
    node.val = [node, Handle()]
    copy = send_to_program(node)
    assert type(copy) is Node
    assert copy.val == [copy, "an object of the program"]
    assert callable(send_to_program(lambda x: x))
    assert send_to_program(iter([1, 2])) == [1, 2]


def test_an_error_names_the_type_that_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match="Absent is not plain data"):
        send_to_program([ABSENT])


def test_changes_are_made_to_the_tests_own_objects() -> None:
    inner: list[int] = [1]
    local = {"a": inner, "b": {2}}
    assert update_in_place(local, {"a": [1, 3], "b": {4}, "c": ()}) is local
    assert local == {"a": [1, 3], "b": {4}, "c": ()}
    assert local["a"] is inner
    assert update_in_place(inner, "other") == "other"
    assert inner == [1, 3]
