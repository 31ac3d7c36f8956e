"""Scores programs with a Sandbox Fusion service or in a local box, with verl's return value."""

from __future__ import annotations

import contextlib

from hone.rewards.programs import Limits, extract_code, passes, read_tests
from hone.rewards.scores.prime_code import MAX_COUNTED_TESTS
from hone.types import Fields, JsonValue


def compute_score(
    sandbox_fusion_url: str | None,
    concurrent_semaphore: contextlib.AbstractContextManager[bool] | None,
    memory_limit_mb: int | None,
    completion: str,
    test_cases: JsonValue,
    continuous: bool = False,
    timeout: float = 10,
) -> tuple[float, list[Fields]]:
    """Returns the share of passed tests and a dict per test; `continuous` runs only ten tests."""
    limits = Limits(timeout, memory_limit_mb, sandbox_fusion_url)
    code = extract_code(completion)
    tests = read_tests(test_cases, None)[: MAX_COUNTED_TESTS if continuous else None]
    with concurrent_semaphore or contextlib.nullcontext():
        results = [passes(code, test, limits) for test in tests]
    metadata: list[Fields] = [
        {"test": index, "passed": has_passed} for index, has_passed in enumerate(results)
    ]
    return sum(results) / len(results), metadata
