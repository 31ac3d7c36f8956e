"""No cheating program passes the tests, and none makes the scorer raise."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from hone.rewards.programs import (
    CODE_PLACEHOLDER,
    CallTest,
    Limits,
    SourceTest,
    StdinTest,
    Test,
    passes,
)

from .cheats import CHEATS, EQUALITY, SERIALISATION, TYPES

pytestmark = pytest.mark.usefixtures("needs_sandbox")

LIMITS = Limits(timeout_s=2.0, memory_mb=256)
RIGHT = "def add(a, b): return a + b"
SIMPLE = "assert add(1, 2) == 3\nassert add(-5, 7) == 2\nassert add(10, 20) == 30\n"
ASSERTS = """
assert abs(add(0.5, 0.25) - 0.75) < 1e-9
assert sorted([add(3, 1), add(1, 1)]) == [2, 4]
assert set([add(1, 1)]) == {2}
"""
CLOSE = """
import math

def check(candidate):
    assert math.isclose(candidate(1, 2), 3.0)
    assert abs(candidate(1, 1) - 2) < 1e-6
    assert candidate(2, 2) in (4, 5)
    assert all(x > 10 for x in map(candidate, [10, 20], [1, 2]))

check(add)
"""
CAUGHT = """
try:
    result = add(1, 2)
except Exception:
    result = None
assert result is not None and result == 3
"""
WITH_PREAMBLE = f"""
from math import *

class TreeNode:
    def __init__(self, val=0):
        self.val = val

def same(p, q):
    return not p and not q or p.val == q.val

{CODE_PLACEHOLDER}
def check(candidate):
    assert same(TreeNode(candidate(1, 2)), TreeNode(3))
    assert isinstance(candidate(1, 1), int) and candidate(1, 1) == 2

check(add)
"""
STYLES = {
    "simple": SIMPLE,
    "asserts": ASSERTS,
    "close": CLOSE,
    "caught": CAUGHT,
    "preamble": WITH_PREAMBLE,
}


def passing(programs: dict[str, str], test: Test) -> list[str]:
    """Returns the names of the programs that pass."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        results = pool.map(lambda program: passes(program, test, LIMITS), programs.values())
        return [name for name, passed in zip(programs, results, strict=True) if passed]


def test_cheats_patch_attributes_that_exist() -> None:
    from hone.sandbox.judging import program_server, proxies

    assert callable(program_server.Encoder.encode)
    assert callable(program_server.ProgramSession._execute)
    assert all(
        map(proxies.__dict__.get, ("TestsFailed", "Session", "TestNamespace", "RemoteObject"))
    )


def test_there_are_at_least_ten_cheats_of_each_kind() -> None:
    assert len(CHEATS) >= 10
    assert all(len(cheats) >= 10 for cheats in CHEATS.values())


@pytest.mark.parametrize("style", STYLES)
def test_the_right_program_passes(style: str) -> None:
    assert passes(RIGHT, SourceTest(STYLES[style]), Limits(timeout_s=30.0, memory_mb=256))


@pytest.mark.parametrize("kind", CHEATS)
def test_a_cheat_of_each_kind_scores_nothing(kind: str) -> None:
    assert passing(dict([*CHEATS[kind].items()][:2]), SourceTest(SIMPLE)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHEATS)
def test_no_cheat_passes(kind: str) -> None:
    assert passing(CHEATS[kind], SourceTest(SIMPLE)) == []


@pytest.mark.slow
@pytest.mark.parametrize("style", ["asserts", "close", "caught", "preamble"])
def test_no_cheat_of_values_scores_in_any_style(style: str) -> None:
    values = {**EQUALITY, **TYPES, **SERIALISATION}
    assert passing(values, SourceTest(STYLES[style])) == []


BREAKING = {
    "no JSON after the secret": "print",
    "deep JSON": "lambda o: '[' * 100_000",
    "a huge integer": "lambda o: '9' * 100_000",
    "not a number": "lambda o: 'NaN'",
    "infinity": "lambda o: '1e999'",
    "lone surrogates": "lambda o: chr(34) + chr(92) + 'ud800' + chr(34)",
    "nothing": "lambda o: ''",
}


@pytest.mark.parametrize("expected", [3, 0.75, [1], {"a": 1}])
def test_no_answer_to_a_call_makes_the_scorer_raise(expected: object) -> None:
    programs = {
        name: f"import json\njson.dumps = {dumps}\ndef add(*_): return 0"
        for name, dumps in BREAKING.items()
    }
    test = CallTest("add", [1, 2], expected)
    assert passing(programs if expected == 3 else dict([*programs.items()][:3]), test) == []


def test_no_output_makes_the_scorer_raise() -> None:
    programs = {
        "bytes": "import sys\nsys.stdout.buffer.write(bytes(range(256)))",
        "a long number": "print('9' * 100_000 + '.5')",
        "infinities": "print('inf nan -inf 1e999')",
        "underscores": "print('0_0.7_5')",
        "nothing": "",
    }
    assert passing(programs, StdinTest("", "0.75")) == []
