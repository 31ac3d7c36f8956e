"""Programming contests: runs a program on tests in the sandbox, and checks its output.

If a test fails, the score is 0, or with `continuous` the share of passed tests among the first ten.
"""

from __future__ import annotations

import contextlib
from threading import Semaphore

from hone.rewards.programs import Limits, count_passed, extract_code, read_tests
from hone.types import Fields, JsonValue, Settings

MAX_COUNTED_TESTS = 10  # with `continuous`, the score is the share of these first tests that pass
TEST_TIMEOUT_S = 10.0


def score_details(
    solution_str: str,
    ground_truth: JsonValue = None,
    extra_info: Settings | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Semaphore | None = None,
    memory_limit_mb: int | None = None,
    continuous: bool = True,
    timeout_s: float = TEST_TIMEOUT_S,
) -> dict[str, float]:
    """Returns the score and `acc`, which is 1 if all tests pass."""
    limits = Limits(timeout_s, memory_limit_mb, sandbox_fusion_url)
    tests = read_tests(ground_truth, extra_info)
    code = extract_code(solution_str)
    with concurrent_semaphore or contextlib.nullcontext():
        num_always_run = MAX_COUNTED_TESTS if continuous else 0  # 0: stop at the first failed test
        has_passed_all, num_passed = count_passed(code, tests, limits, num_always_run)
    share = num_passed / min(MAX_COUNTED_TESTS, len(tests)) if continuous else 0.0
    return {"score": 1.0 if has_passed_all else share, "acc": float(has_passed_all)}


def compute_score(
    completion: str,
    test_cases: JsonValue,
    continuous: bool = False,
    sandbox_fusion_url: str | None = None,
    memory_limit_mb: int | None = None,
    timeout_s: float = TEST_TIMEOUT_S,
) -> tuple[float, Fields]:
    """Returns the score and metadata, as verl does."""
    result = score_details(
        completion,
        test_cases,
        sandbox_fusion_url=sandbox_fusion_url,
        memory_limit_mb=memory_limit_mb,
        continuous=continuous,
        timeout_s=timeout_s,
    )
    num_tests = len(read_tests(test_cases, None))
    return result["score"], {"all_passed": result["acc"] == 1.0, "tests": num_tests}
