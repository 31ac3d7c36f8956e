"""Programming contests: checks the program's output on the tests, in the sandbox.

The score is 1 if all tests pass, else 0, or with `continuous` the share of the first ten tests that pass.
"""

from __future__ import annotations

import contextlib
from threading import Semaphore

from hone.rewards.programs import Limits, count_passed, extract_code, read_tests
from hone.types import Fields, JsonValue, Settings

MAX_COUNTED_TESTS = 10  # how many tests count with `continuous`
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
        num_counted = MAX_COUNTED_TESTS if continuous else 0
        all_passed, num_passed = count_passed(code, tests, limits, num_counted)
    share = num_passed / min(MAX_COUNTED_TESTS, len(tests)) if continuous else 0.0
    return {"score": 1.0 if all_passed else share, "acc": float(all_passed)}


def compute_score(
    completion: str,
    test_cases: JsonValue,
    continuous: bool = False,
    sandbox_fusion_url: str | None = None,
    memory_limit_mb: int | None = None,
    timeout_s: float = TEST_TIMEOUT_S,
) -> tuple[float, Fields]:
    """Returns verl's (score, metadata); `continuous` gives the share of the first ten tests."""
    url, memory_mb = sandbox_fusion_url, memory_limit_mb
    result = score_details(
        completion, test_cases, None, url, None, memory_mb, continuous, timeout_s
    )
    tests = len(read_tests(test_cases, None))
    return result["score"], {"all_passed": result["acc"] == 1.0, "tests": tests}
