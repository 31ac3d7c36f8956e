from __future__ import annotations

import json
from typing import Any

import pytest

from hone.rewards import programs
from hone.rewards.ground_truth import GroundTruthError
from hone.rewards.programs import CallTest, SourceTest, StdinTest, extract_code, read_tests


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("x\n```python\na = 1\n```\ny", "a = 1\n"),
        ("```py\na\n```\nthen\n```python\nb\n```", "b\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("```\nplain\n```", "plain\n"),
        ("```python\nnever closed", "never closed"),
        ("no fence", "no fence"),
    ],
)
def test_the_last_python_block_is_the_program(text: str, code: str) -> None:
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("truth", "extra", "tests"),
    [
        ({"inputs": ["1\n"], "outputs": ["2\n"]}, None, [StdinTest("1\n", "2\n")]),
        (json.dumps({"inputs": ["1"], "outputs": ["2"]}), None, [StdinTest("1", "2")]),
        (None, {"test_cases": [{"input": 2, "output": True}]}, [StdinTest("2", "True")]),
        (
            None,
            {"test_cases": [("a", "b"), ["c", "d"]]},
            [StdinTest("a", "b"), StdinTest("c", "d")],
        ),
        ({"functional": "assert f()"}, None, [SourceTest("assert f()")]),
        (
            {"assert_case": ["assert a", "assert b"]},
            None,
            [SourceTest("assert a"), SourceTest("assert b")],
        ),
        ("assert f()", None, [SourceTest("assert f()")]),
        (["assert f()"], None, [SourceTest("assert f()")]),
        (
            {"fn_name": "f", "inputs": [[1, [2]], "3\n4"], "outputs": [[5], "6"]},
            None,
            [CallTest("f", [1, [2]], 5), CallTest("f", [3, 4], 6)],
        ),
        (
            {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[5], [5, 6]]},
            None,
            [CallTest("f", [1], [5]), CallTest("f", [2], [5, 6])],
        ),
        (
            {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[[5]], [[]]]},
            None,
            [CallTest("f", [1], [5]), CallTest("f", [2], [])],
        ),
    ],
)
def test_all_test_formats_of_benchmarks_are_read(truth: Any, extra: Any, tests: list[Any]) -> None:
    assert read_tests(truth, extra) == tests


@pytest.mark.parametrize(
    "truth",
    [
        *(None, "", [], {}, {"inputs": ["1"], "outputs": []}),
        *("# nothing", " \n# a\n\n  # b", ["# a", "", "#"], {"functional": "# later"}, [" "]),
        *({"functional": "__CODE__\n# later"}, {"assert_case": ["#"]}),
    ],
)
def test_a_row_without_tests_is_an_error_not_a_pass(truth: Any) -> None:
    with pytest.raises(GroundTruthError):
        read_tests(truth, {})


def test_the_marker_of_the_program_separates_preamble_and_tests() -> None:
    test = SourceTest("import math\n__CODE__\nassert f(1)\n")
    assert test.split() == ("import math\n", "\nassert f(1)\n")
    assert SourceTest("assert f(1)").split() == ("", "assert f(1)")
    with pytest.raises(GroundTruthError, match="line of its own"):
        SourceTest("x = '__CODE__'").split()


def test_the_suite_stops_at_the_first_failure_then_counts_the_first_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tests_run: list[int] = []

    def passes(code: str, test: Any, limits: Any) -> bool:
        tests_run.append(int(test.stdin))
        return test.expected == "pass"

    monkeypatch.setattr(programs, "passes", passes)
    limits = programs.Limits(1.0, 64)

    def suite(outcomes: str) -> list[StdinTest]:
        return [StdinTest(str(i), "pass" if m == "1" else "fail") for i, m in enumerate(outcomes)]

    assert programs.count_passed("", suite("1" * 15), limits, 10) == (True, 10)
    assert tests_run == list(range(15))
    tests_run.clear()
    assert programs.count_passed("", suite("1101" + "1" * 20), limits, 10) == (False, 9)
    assert tests_run == list(range(10))
    tests_run.clear()
    assert programs.count_passed("", suite("1" * 12 + "0" + "1"), limits, 10) == (False, 10)
    assert tests_run == list(range(13))
    assert programs.count_passed("", suite("0111"), limits, 0) == (False, 0)
