from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.rewards.scores import asserts, default_compute_score

hone_sandbox = pytest.importorskip("hone.sandbox")


@pytest.fixture(autouse=True)
def _needs_a_box() -> None:
    try:
        hone_sandbox.run_python("print(1)", timeout_s=30.0)
    except hone_sandbox.SandboxUnavailable as error:
        pytest.skip(f"no sandbox here: {error}")


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
def test_only_held_assertions_count(code: str, score: float) -> None:
    assert asserts.compute_score(block(code), TESTS) == score


@pytest.mark.parametrize(
    ("truth", "extra"),
    [
        ("\n".join(TESTS), None),
        ({"functional": "\n".join(TESTS)}, None),
        ({"functional": "__CODE__\nassert f(1) == 2"}, None),
        (None, {"test_list": TESTS, "test_imports": ["import math"]}),
        (None, {"test": "def check(g):\n    assert g(1) == 2", "entry_point": "f"}),
    ],
)
def test_assertions_come_in_the_benchmarks_forms(truth: Any, extra: Any) -> None:
    assert default_compute_score("mbpp", block(RIGHT), truth, extra) == 1.0
    assert default_compute_score("mbpp", block("def f(x): return 0"), truth, extra) == 0.0


@pytest.mark.slow
def test_reference_programs_of_the_real_sets_pass(
    shared_rows: Callable[[str], list[dict[str, Any]]],
) -> None:
    for row in shared_rows("humaneval/test.jsonl"):
        answer = block(row["prompt"] + row["canonical_solution"])
        extra = {"test": row["test"], "entry_point": row["entry_point"]}
        assert asserts.compute_score(answer, None, extra) == 1.0, row["task_id"]
    for row in shared_rows("mbpp/sanitized_mbpp.jsonl")[:120]:
        assert asserts.compute_score(block(row["code"]), None, row) == 1.0, row["task_id"]
