"""Tests get exact copies of a program's values, and the program cannot influence the verdict."""

# ruff: noqa: E501 (programs as text)

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hone.sandbox import client
from hone.sandbox.judging import judge
from hone.sandbox.judging.judge import _judge_boxes

pytestmark = pytest.mark.usefixtures("bwrap")


NODE = """
class Node:
    def __init__(self, val, next=None):
        self.val, self.next = val, next
    def total(self):
        return self.val + (self.next.total() if self.next else 0)
"""
PASSING_CASES = {
    "plain types": (
        "def f(): return [None, True, 1, 1.5, 'x', b'y', (1, [2]), {3}, frozenset({4}), {5: (6,)}, 1j]",
        "assert f() == [None, True, 1, 1.5, 'x', b'y', (1, [2]), {3}, frozenset({4}), {5: (6,)}, 1j]\n"
        "assert [type(v).__name__ for v in f()[6:10]] == ['tuple', 'set', 'frozenset', 'dict']",
    ),
    "nan and infinity": (
        "def f(): return float('nan'), float('-inf')",
        "a, b = f()\nassert a != a and b == float('-inf')",
    ),
    "large integers": (
        "def f(x): return [x, x * x]",
        "assert f(10**5000) == [10**5000, 10**10000]",
    ),
    "collections": (
        "from collections import *\ndef f(): return Counter('aab'), deque([1]), OrderedDict(a=1), defaultdict(int, b=2)",
        "from collections import *\nassert f() == (Counter('aab'), deque([1]), OrderedDict(a=1), {'b': 2})",
    ),
    "views and ranges": (
        "def f(): return {1: 2}.keys(), {1: 2}.items(), range(3)",
        "assert f() == ({1}, {(1, 2)}, range(3))",
    ),
    "decimals and fractions": (
        "from decimal import *\nfrom fractions import *\ndef f(x): return Decimal('0.1'), x",
        "from decimal import *\nfrom fractions import *\nassert f(Fraction(1, 3)) == (Decimal('0.1'), Fraction(1, 3))",
    ),
    "a list changed in place": (
        "def f(x): x[0].append(1)",
        "x = [[]]\ny = x[0]\nf(x)\nassert x == [[1]] and y == [1]",
    ),
    "other arguments changed in place": (
        "def f(s, d=None): s.add(1); d['a'] = [2]",
        "s, d = set(), {}\nf(s, d=d)\nassert (s, d) == ({1}, {'a': [2]})",
    ),
    "rows that are one list": (
        "def f(g): g[0][0] = 1; return g[1][0]",
        "assert f([[0] * 2] * 2) == 1",
    ),
    "generators": (
        "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        "from itertools import islice\nassert list(islice(f(), 70)) == list(range(70))",
    ),
    "generators that end": (
        "def f(n): return (i * i for i in range(n))",
        "assert list(f(100))[-1] == 99 * 99 and sorted(f(3)) == [0, 1, 4] and 4 in f(3) and sum(f(3)) == 5",
    ),
    "objects that iterate and have no length": (
        "class A:\n    def __iter__(self): return iter([1, 2])",
        "assert list(A()) == [1, 2] and set(A()) == {1, 2}",
    ),
    "context managers and descriptions": (
        "class A:\n    def __enter__(self): return 3\n    def __exit__(self, *_): self.left = True",
        "a = A()\nwith a as value:\n    assert value == 3\nassert a.left and A.__name__ == 'A'",
    ),
    "names in a class of the tests": (
        "def f(x): return x + 1",
        "class Case:\n    value = f(1)\n    def check(self): assert f(2) == 3 and self.value == 2\nCase().check()",
    ),
    "errors that cannot be printed": (
        "class E(Exception):\n    def __str__(self): raise KeyError\ndef f(x):\n    if x: raise E\n    return 1",
        "try:\n    f(1)\n    assert False\nexcept E:\n    assert f(0) == 1",
    ),
    "exceptions": (
        "class Odd(ValueError): pass\ndef f(x):\n    raise Odd(f'no {x}') if x else KeyError('k')",
        "for kind, x in ((Odd, 1), (ValueError, 2), (KeyError, 0)):\n    try:\n        f(x)\n"
        "    except kind as error:\n        assert str(x) in str(error) or kind is KeyError\n"
        "    else:\n        assert False",
    ),
    "objects of the program": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def __len__(self): return len(self.items)\n    def __getitem__(self, i): return self.items[i]\n"
        "    def __iter__(self): return iter(self.items)",
        "s = Stack()\ns.push(3)\nassert len(s) == 1 and s[0] == 3 and list(s) == [3] and 3 in s and s.items == [3]\n"
        "s.items = [4]\nassert s[0] == 4",
    ),
    "functions of the tests": (
        "def f(g, x): return g(g(x))",
        "assert f(lambda x: 2 * x, 3) == 12\nassert f(int, '5') == 5",
    ),
    "functions of the program": ("def f(n): return lambda x: x + n", "assert f(1)(2) == 3"),
    "a match": (
        "import re\ndef f(x): return re.search('a', x)",
        "assert f('a')\nassert not f('b')\nassert f('a') is not None",
    ),
    "modules that the program imported": (
        "import sys\ndef f(x): return x",
        "assert sys.getsizeof(f('')) > 0",
    ),
    "a program's function named as a built-in": (
        "def sum(a, b): return a - b",
        "assert sum(3, 1) == 2",
    ),
    "variables of the program": (
        "LIMIT = {'a': 1}\ndef f(): LIMIT['a'] += 1",
        "f()\nassert LIMIT == {'a': 2}",
    ),
    "dates and times": (
        "import datetime as d\ndef f(x, y): return [x, x - y, d.timedelta(2), d.time(1, 2)]",
        "import datetime as d\nx, y = d.datetime(2020, 2, 1, 12), d.timedelta(1)\n"
        "assert f(x, y) == [x, x - y, d.timedelta(2), d.time(1, 2)]\n"
        "assert f(d.date(2020, 3, 1), y)[1] == d.date(2020, 2, 29)\n"
        "z = x.replace(tzinfo=d.timezone(d.timedelta(hours=-5)))\n"
        "assert f(z, y)[0] == z and f(z, y)[0].utcoffset() == d.timedelta(hours=-5)",
    ),
    "standard input is empty": (
        "import sys\ntext = sys.stdin.read()\ndef f(): return text",
        "assert f() == ''",
    ),
    "a main block": (
        "def f(): return 1\nif __name__ == '__main__': print('hello')",
        "assert f() == 1",
    ),
}


@pytest.mark.parametrize("name", PASSING_CASES)
def test_values_of_the_program_arrive_unchanged(name: str) -> None:
    program, tests = PASSING_CASES[name]
    judgement = judge(program, tests)
    assert judgement.passed, judgement.reason
    assert judgement.answers > 0


def test_objects_of_preamble_classes_keep_their_structure_and_changes() -> None:
    program = "def f(n):\n    n.next = Node(n.val, n.next)\n    n.val = 9\n    return n"
    tests = "n = Node(1, Node(2))\nassert f(n) is n and (n.val, n.next.val) == (9, 1) and n.total() == 12\n"
    tests += "m = Node(0)\nm.next = m\nassert f(m).next.next is m\n"
    tests += "long = None\nfor i in range(5000): long = Node(i, long)\nassert f(long).next.next.val == 4998\n"
    judgement = judge(program, tests, preamble=NODE)
    assert judgement.passed, judgement.reason


KINDS = """
from dataclasses import dataclass
from enum import Enum, Flag
from typing import NamedTuple

class Color(Enum):
    RED = 1
    BLUE = "b"

class Access(Flag):
    READ = 1
    WRITE = 2

class Pair(NamedTuple):
    x: int
    y: int

@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: list

class Slots:
    __slots__ = ("x", "y")

class Words(list):
    pass
"""
PREAMBLE_CASES = {
    "members of an enumeration": (
        "def f(c): return [c, {Color.BLUE: 1}, Access.READ | Access.WRITE]",
        "assert f(Color.RED) == [Color.RED, {Color.BLUE: 1}, Access.READ | Access.WRITE]",
    ),
    "named tuples": (
        "def f(p): return Pair(p.y, [p.x])",
        "assert f(Pair(1, 2)) == Pair(2, [1]) and f(Pair(1, 2)).y == [1]",
    ),
    "frozen data classes with slots": (
        "def f(p): return Point(p.x + 1, p.y)",
        "assert f(Point(1, [3])) == Point(2, [3])",
    ),
    "slots that the program changes": (
        "def f(s):\n    s.y = s.x\n    del s.x\n    return 1",
        "s = Slots()\ns.x = 4\nassert f(s) == 1 and s.y == 4 and not hasattr(s, 'x')",
    ),
    "subclasses of built-in types": ("def f(): return Words('ab')", "assert f() == ['a', 'b']"),
}


@pytest.mark.parametrize("name", PREAMBLE_CASES)
def test_values_of_preamble_classes_arrive_unchanged(name: str) -> None:
    program, tests = PREAMBLE_CASES[name]
    judgement = judge(program, tests, preamble=KINDS)
    assert judgement.passed, judgement.reason
    assert judgement.answers > 0


FAILING_CASES = {
    "a method of the preamble's class replaced": (
        "def f():\n    n = Node(1)\n    n.__dict__['total'] = lambda: 3\n    return n",
        "assert f().total() == 3",
    ),
    "a name of the preamble replaced": (
        "class Node: total = lambda s: 3\ndef f(): return 1",
        "assert Node(1).total() == 3 * f()",
    ),
    "a predicate of the program's": (
        "class S:\n    def startswith(self, x): return True\ndef f(): return S()",
        "assert f().startswith('a')",
    ),
    "an exception that ends a loop": ("def f(x): raise StopIteration", "assert all(map(f, [1]))"),
    "a bare except in the tests": (
        "class E:\n    __eq__ = lambda *_: True\ndef f(): return E()",
        "try:\n    assert f() == 3\nexcept:\n    pass",
    ),
    "an exit that the tests expect as an error": (
        "import os\ndef f(): os._exit(0)",
        "try:\n    f()\nexcept BaseException:\n    pass",
    ),
    "arithmetic that gets the expected value": (
        "class N:\n    def __sub__(self, other): return 0\ndef f(): return N()",
        "assert abs(f() - 3) < 1e-6",
    ),
    "a name that is not there": ("def g(): return 1", "assert f() == 1"),
    "a program that does not compile": ("def f(", "assert f() == 1"),
    "a program with NUL": ("x = '\0'", "assert x"),
    "a program of surrogates": ("x = '\ud800'", "assert f() == 1"),
}


@pytest.mark.parametrize("name", FAILING_CASES)
def test_the_program_cannot_decide_a_test(name: str) -> None:
    program, tests = FAILING_CASES[name]
    judgement = judge(program, tests, preamble=NODE)
    assert not judgement.passed
    assert judgement.usable
    assert judgement.reason


@pytest.mark.parametrize(
    ("tests", "preamble"),
    [("assert (", ""), ("pass\0", ""), ("pass", "raise KeyError"), ("pass", "def")],
)
def test_tests_that_cannot_run_are_not_the_programs_failure(tests: str, preamble: str) -> None:
    judgement = judge("def f(): pass", tests, preamble=preamble)
    assert (judgement.passed, judgement.usable) == (False, False)


UNDEFINED_HELPERS = {
    "a tolerance": ("assert isclose(f(2), 4.0)", "f and isclose"),
    "a module": ("import math\nassert np.allclose(f(2), math.pi)", "f and np"),
    "a comparison of a variable": ("x = f(2)\nassert is_equal(x, 4)", "f and is_equal"),
    "a comparison of a changed argument": (
        "x = []\nf(x)\nassert is_equal(x, [4])",
        "f and is_equal",
    ),
    "a helper of the checking function": (
        "def check(c):\n    x = c([1, 2])\n    assert abs(poly([1, 2], x)) < 1e-4\ncheck(find_zero)",
        "find_zero and poly",
    ),
    "a collection": ("assert Counter(f(2)) == Counter([4])", "Counter and f"),
    "a loop": ("for x in f(2):\n    assert is_equal(x, 4)", "f and is_equal"),
}


@pytest.mark.parametrize("name", UNDEFINED_HELPERS)
def test_a_helper_that_the_tests_do_not_define_is_not_the_programs(name: str) -> None:
    tests, names = UNDEFINED_HELPERS[name]
    answer_all = "def __getattr__(name): return f"
    program = "\n".join(f"def {n}(*_): return 0" for n in names.split(" and ")) + f"\n{answer_all}"
    judgement = judge(program, tests)
    assert (judgement.passed, judgement.usable) == (False, False)
    assert f"they use {names} together" in judgement.reason


DEFINED_HELPERS = {
    "imported": "from math import isclose\nassert isclose(f(2), 3.0)",
    "imported with a star": "from math import *\nassert isclose(f(2), 3.0)",
    "two functions apart": "x = 2\nassert f(x) == 3\nassert g(x) == 4\ny = f(x)\nz = g(x)\nassert y < z",
    "two functions in one test": "def check():\n    assert f(2) == 3\n    assert g(2) == 4\ncheck()",
    "a class of the program": "p = Pair(1)\np.x = 2\nassert h(Pair(3), [p]) == 5",
}


@pytest.mark.parametrize("name", DEFINED_HELPERS)
def test_functions_of_a_program_are_tested_one_by_one(name: str) -> None:
    program = (
        "def f(x): return x + 1\ndef g(x): return x + 2\ndef h(p, q): return p.x + q[0].x\n"
        "class Pair:\n    def __init__(self, x): self.x = x"
    )
    judgement = judge(program, DEFINED_HELPERS[name])
    assert judgement.passed, judgement.reason


def test_tests_without_a_call_count_no_answers() -> None:
    assert judge("def f(): return 1", "def check(c): pass\ncheck(f)").answers == 0


def test_tests_that_never_end_are_stopped() -> None:
    judgement = judge("def f(): return 1", "f()\nwhile True: pass", timeout_s=0.2)
    assert not judgement.passed


def test_concurrent_judgements_are_independent() -> None:
    def is_right(number: int) -> bool:
        return judge(f"def f(): return {number}", f"assert f() == {number}").passed

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(is_right, range(24)))


def test_a_lost_judge_or_warden_is_replaced() -> None:
    program, tests = "def f(): return 1", "assert f() == 1"
    assert judge(program, tests).passed
    client.close()
    assert judge(program, tests).passed
    for box in _judge_boxes.values():
        box.close()
    assert judge(program, tests).passed


def test_a_judgement_is_repeated_if_the_judge_is_killed() -> None:
    slow = "import time\ndef f():\n    time.sleep(0.5)\n    return 1"
    assert judge("def f(): return 1", "assert f() == 1").passed
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(judge(slow, "assert f() == 1").passed))
    thread.start()
    (box,) = _judge_boxes.values()
    assert box._run is not None
    signal.pidfd_send_signal(box._run._descriptors[0], signal.SIGKILL)
    thread.join(60)
    assert results == [True]


def test_a_program_and_its_judge_share_no_namespace_and_no_file() -> None:
    links = "[__import__('os').readlink('/proc/self/ns/' + n) for n in ('pid', 'mnt', 'net', 'ipc', 'user')]"
    program = f"def f(): open('/box/mine', 'w').close(); return {links}"
    tests = f"import os\nmine = {links}\ntheirs = f()\nassert not set(mine) & set(theirs), (mine, theirs)\n"
    tests += "assert not os.path.exists('/box/mine')\nassert len(os.listdir('/box')) > 1"
    judgement = judge(program, tests)
    assert judgement.passed, judgement.reason
