from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.rewards.ground_truth import GroundTruthError
from hone.rewards.scores import default_compute_score, prime_code, sandbox_fusion

pytestmark = pytest.mark.usefixtures("needs_sandbox")


def block(code: str) -> str:
    return f"Here:\n```python\n{code}\n```\n"


ODD = block("n = int(input())\nprint(n % 2 == 1)")
CASES = [("2", "False"), ("3", "True"), ("5", "True"), ("17", "True")]


def suite(cases: list[tuple[str, str]]) -> dict[str, Any]:
    return {"inputs": [case[0] for case in cases], "outputs": [case[1] for case in cases]}


def test_all_tests_passed_is_one() -> None:
    assert prime_code.score_details(ODD, suite(CASES)) == {"score": 1.0, "acc": 1.0}


def test_partial_passes_score_their_share_or_zero_without_continuous() -> None:
    cases = [*CASES[:3], ("4", "True")]
    assert prime_code.score_details(ODD, suite(cases)) == {"score": 0.75, "acc": 0.0}
    metadata = {"all_passed": False, "tests": 4}
    assert prime_code.compute_score(completion=ODD, test_cases=suite(cases)) == (0.0, metadata)
    assert prime_code.compute_score(ODD, suite(cases), True) == (0.75, metadata)
    share, results = sandbox_fusion.compute_score(None, None, None, ODD, suite(cases))
    assert (share, [result["passed"] for result in results]) == (0.75, [True, True, True, False])


def test_tests_may_be_in_the_extra_information() -> None:
    cases = [{"input": stdin, "output": expected} for stdin, expected in CASES]
    score = default_compute_score("codecontests", ODD, None, {"test_cases": cases})
    assert score == 1.0  # a number, as in verl; managers get the parts
    parts = prime_code.score_details(ODD, None, {"test_cases": cases})
    assert parts == {"score": 1.0, "acc": 1.0}


def test_functions_and_methods_are_called() -> None:
    truth = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}
    assert prime_code.compute_score(block("def add(a, b): return a + b"), truth)[0] == 1.0
    method = "class Solution:\n    def add(self, a, b): return a + b"
    assert prime_code.compute_score(block(method), truth)[0] == 1.0
    assert prime_code.compute_score(block("def add(a, b): return a * b"), truth)[0] == 0.0


@pytest.mark.parametrize(
    ("outputs", "right", "wrong"),
    [
        ([[2], [4]], "x[-1]", "x[-1:]"),  # as APPS writes 2 and 4
        ([2, 4], "x[-1]", "x[-1:]"),
        (["2", "4"], "x[-1]", "x[-1:]"),
        ([[[2]], [[4]]], "x[-1:]", "x[-1]"),  # as APPS writes [2] and [4]
        (["[2]", "[4]"], "x[-1:]", "x[-1]"),
        ([[1, 2], [4]], "x", "x[-1]"),  # the first shows that these are the values themselves
    ],
)
def test_a_list_of_one_item_is_not_its_item(outputs: list[Any], right: str, wrong: str) -> None:
    truth = {"fn_name": "f", "inputs": [[[1, 2]], [[4]]], "outputs": outputs}
    assert prime_code.compute_score(block(f"def f(x): return {right}"), truth)[0] == 1.0
    assert prime_code.score_details(block(f"def f(x): return {wrong}"), truth)["acc"] == 0.0


@pytest.mark.parametrize(
    "code",
    ["syntax error(", "raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)", "x = []"],
)
def test_a_program_that_fails_passes_nothing(code: str) -> None:
    assert prime_code.score_details(block(code), suite(CASES[:2]))["score"] == 0.0


def test_a_program_that_hangs_is_stopped() -> None:
    result = prime_code.score_details(block("while True: pass"), suite(CASES[:1]), timeout_s=1.0)
    assert result == {"score": 0.0, "acc": 0.0}


def test_a_row_without_tests_is_an_error() -> None:
    with pytest.raises(GroundTruthError, match="no tests"):
        prime_code.score_details(ODD, None, {})


def test_the_real_set_is_readable(shared_rows: Callable[[str], list[dict[str, Any]]]) -> None:
    from hone.rewards.programs import read_tests

    for row in shared_rows("taco/test_512.jsonl.gz"):
        assert len(read_tests(row["tests"], None)) >= 1
