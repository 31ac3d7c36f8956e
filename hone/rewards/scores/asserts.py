"""MBPP, HumanEval and LeetCode: the program must satisfy the assertions of the row.

Assertions come from the ground truth, or from the benchmarks' fields in `extra_info`.
"""

from __future__ import annotations

from hone.data.preprocess.programs import humaneval_tests
from hone.data.values import to_python
from hone.rewards.programs import (
    CODE_PLACEHOLDER,
    Limits,
    SourceTest,
    extract_code,
    passes,
    read_tests,
)
from hone.rewards.scores.prime_code import TEST_TIMEOUT_S
from hone.types import Fields, JsonValue, Settings


def compute_score(
    solution_str: str,
    ground_truth: JsonValue = None,
    extra_info: Settings | None = None,
    sandbox_fusion_url: str | None = None,
    memory_limit_mb: int | None = None,
    timeout_s: float = TEST_TIMEOUT_S,
) -> float:
    """Returns 1.0 if every assertion holds, else 0.0."""
    limits = Limits(timeout_s, memory_limit_mb, sandbox_fusion_url)
    assertions = to_python(ground_truth) or _benchmark_assertions(to_python(extra_info or {}))
    tests = read_tests(assertions, extra_info)
    sources = [test.source for test in tests if isinstance(test, SourceTest)]
    has_preamble = any(CODE_PLACEHOLDER in source for source in sources)
    if len(sources) == len(tests) and not has_preamble:
        # One run for all sources is faster than a run per source.
        tests = [SourceTest("\n".join(sources))]
    code = extract_code(solution_str)
    return float(all(passes(code, test, limits) for test in tests))


def _benchmark_assertions(info: Fields) -> list[JsonValue]:
    """Returns the assertions in the fields of MBPP and HumanEval."""
    if info.get("test") and info.get("entry_point"):
        return [humaneval_tests(info)]
    if not info.get("test_list"):
        return []
    setup = [info["test_setup_code"]] if info.get("test_setup_code") else []
    return [*(info.get("test_imports") or []), *setup, *info["test_list"]]
