from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hone.rewards.ground_truth import GroundTruthError
from hone.rewards.scores import asserts, default_compute_score

pytestmark = pytest.mark.usefixtures("needs_sandbox")


def block(code: str) -> str:
    return f"```python\n{code}\n```"


TESTS = ["assert f(1) == 2", "assert f(2) == 3"]
RIGHT = "def f(x): return x + 1"


@pytest.mark.parametrize(
    ("code", "score"),
    [
        (RIGHT, 1.0),
        ("def f(x): return 2", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("import os; os._exit(0)", 0.0),
        ("print('all tests passed')\nraise SystemExit", 0.0),
        ("def f(x): raise SystemExit(0)", 0.0),
        ("def f(", 0.0),
    ],
)
def test_all_assertions_must_hold(code: str, score: float) -> None:
    assert asserts.compute_score(block(code), TESTS) == score


@pytest.mark.parametrize(
    ("truth", "extra"),
    [
        ("\n".join(TESTS), None),
        ({"functional": "\n".join(TESTS)}, None),
        (np.array(TESTS), None),
        ({"functional": "__CODE__\nassert f(1) == 2"}, None),
        (None, {"test_list": TESTS, "test_imports": ["import math"]}),
        (None, {"test": "def check(g):\n    assert g(1) == 2", "entry_point": "f"}),
    ],
)
def test_all_assertion_formats_of_benchmarks_are_read(truth: Any, extra: Any) -> None:
    assert default_compute_score("mbpp", block(RIGHT), truth, extra) == 1.0
    assert default_compute_score("mbpp", block("def f(x): return 0"), truth, extra) == 0.0


@pytest.mark.parametrize(
    "tests", ["pass", "import math", "def check(f): pass\ncheck(f)", "assert (", "raise_(\n"]
)
def test_tests_that_call_nothing_are_an_error_of_the_row(tests: str) -> None:
    with pytest.raises(GroundTruthError, match="tests of this row"):
        asserts.compute_score(block(RIGHT), [tests])


@pytest.mark.parametrize(("second_result", "score"), [(3, 1.0), (4, 0.0)])
def test_every_test_of_a_list_has_its_own_preamble(second_result: int, score: float) -> None:
    test = "import math\n__CODE__\nassert math.floor(f({})) == {}"
    tests = [test.format(1, 2), test.format(2, second_result)]
    assert asserts.compute_score(block("def f(x): return x + 1"), tests) == score


def test_a_test_of_output_beside_assertions_counts() -> None:
    program = block("def f(x): return x + 1\nprint(7)")
    tests = ["assert f(1) == 2", "assert f(2) == 3"]
    assert asserts.compute_score(program, [*tests, ["", "7"]]) == 1.0
    assert asserts.compute_score(program, [*tests, ["", "8"]]) == 0.0


def test_the_tests_use_the_functions_of_the_prompt() -> None:
    prompt = 'def encode(s): return s[::-1]\n\ndef decode(s):\n    """Undo encode."""\n'
    test = "def check(candidate):\n    assert candidate(encode('abc')) == 'abc'"
    extra = {"prompt": prompt, "test": test, "entry_point": "decode"}
    right, cheat = "def decode(s): return s[::-1]", "def encode(s): return s\ndecode = encode"
    assert asserts.compute_score(block(prompt + right), None, extra) == 1.0
    assert asserts.compute_score(block(cheat), None, extra) == 0.0


@pytest.mark.slow
def test_reference_programs_of_the_real_sets_pass(
    shared_rows: Callable[[str], list[dict[str, Any]]],
) -> None:
    for row in shared_rows("humaneval/test.jsonl"):
        answer = block(row["prompt"] + row["canonical_solution"])
        extra = {key: row[key] for key in ("prompt", "test", "entry_point")}
        assert asserts.compute_score(answer, None, extra) == 1.0, row["task_id"]
    for row in shared_rows("mbpp/sanitized_mbpp.jsonl")[:120]:
        assert asserts.compute_score(block(row["code"]), None, row, timeout_s=60) == 1.0
