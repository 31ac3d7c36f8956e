"""Compares two LaTeX answers symbolically with math-verify, in processes that can be killed.

Only the LaTeX parser of math-verify is used, because the parser for plain expressions calls Python's
`eval`. Expressions that are too large, and comparisons that exceed their limits, are not equal and are
counted as mishaps.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import lru_cache
from typing import TypeVar

from hone.cores import usable_cores
from hone.rewards.expressions import nesting_depth
from hone.rewards.failures import Failed
from hone.rewards.pool import DeadlinePool
from hone.rewards.scorer import count_mishap

logger = logging.getLogger(__name__)

T = TypeVar("T")
Pair = tuple[str, str]  # an answer and the ground truth
Comparisons = dict[Pair, bool | Failed]  # whether the pair is equal, or why this is unknown

SHORT_CPU_S = 0.1
"""CPU time per comparison in the first round, which makes every comparison of a batch."""
LONG_CPU_S = 0.5
"""CPU time per comparison in the second round, which repeats the comparisons that timed out."""
MAX_LONG_COMPARISONS = 32  # limit on comparisons per batch in the second round
MAX_CRASHES = 8  # number of crashed processes after which a round ends
WALL_LIMIT_S = 60.0  # wall-clock limit of a comparison, for a process that uses no CPU time
MAX_PROCESSES = 8
MAX_CHARS = 1000
_CACHE_SIZE = 65_536

MAX_EXPONENT = 9_999
MAX_EXPONENT_PRODUCT = 1_000_000
"""Limit on the product of all exponents of at least 100: a power of a power multiplies exponents."""
MAX_COUNTING_NUMBER = 999
"""Limit on the numbers in an expression with a factorial, binomial, sum, product, integral or limit."""
MAX_DIGITS = 64
MAX_DEPTH = 40

_NUMBER = re.compile(r"\d+")
_EXPONENT = re.compile(r"\^\s*\{?\s*[+-]?\s*(\d+)")
_TOWER = re.compile(r"\^\s*\{[^{}]*\^\s*\{?[^{}]*\^")
_COUNTING_OPERATOR = re.compile(
    r"!|\\(?:binom|[dt]binom|sum|prod|int|lim|factorial|Gamma|zeta)(?![a-zA-Z])"
)

_SKIPPED = Failed("skipped", "too many comparisons of the batch crashed")
"""The result of a comparison that was not made; the next batch with this pair makes the comparison."""
_lock = threading.Lock()
_pool: DeadlinePool[bool | None] | None = None
num_processes: int | None = None  # the number of comparison processes; None is one per core
_cache: Comparisons = {}
_recorded_pairs: ContextVar[list[Pair] | None] = ContextVar("recorded_pairs", default=None)


def symbolically_equal(answer: str, truth: str) -> bool:
    """Returns whether math-verify finds both equal; False without math-verify or on a timeout."""
    if not is_available() or max(len(answer), len(truth)) > MAX_CHARS:
        return False
    pair = (answer, truth)
    pairs = _recorded_pairs.get()
    if pairs is not None:
        pairs.append(pair)
        return False
    if pair not in _cache:
        compare_all([pair])
    result = _cache[pair]
    if isinstance(result, Failed):
        count_mishap(f"symbolic_{result.reason}")
        return False
    return result


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Returns whether math-verify is installed; logs a warning once otherwise."""
    if importlib.util.find_spec("math_verify") is not None:
        return True
    logger.warning(
        "math-verify is not installed: mathematical answers are compared as normalised text and "
        "numbers only. Install it with: pip install 'hone-rl[math]'"
    )
    return False


def record_pairs(pairs: list[Pair], function: Callable[[], T]) -> T:
    """Returns `function()`, whose comparisons all return False and are added to `pairs`."""
    token = _recorded_pairs.set(pairs)
    try:
        return function()
    finally:
        _recorded_pairs.reset(token)


def compare_all(pairs: Iterable[Pair]) -> None:
    """Makes the uncached comparisons in parallel; repeats comparisons that time out with a longer limit."""
    uncached = [pair for pair in dict.fromkeys(pairs) if _cache.get(pair, _SKIPPED) == _SKIPPED]
    size_problems = {pair: size_problem(pair[0]) or size_problem(pair[1]) for pair in uncached}
    pairs_and_problems = size_problems.items()
    add_to_cache({pair: Failed("refused", text) for pair, text in pairs_and_problems if text})
    pending = [pair for pair in uncached if not size_problems[pair]]
    if len(pending) > 1:
        results = zip(pending, _compare_within_budget(pending, SHORT_CPU_S), strict=True)
        pending = [pair for pair, result in results if _has_reason(result, "timeout")]
    _compare_within_budget(pending[:MAX_LONG_COMPARISONS], LONG_CPU_S)


def _has_reason(result: bool | Failed, reason: str) -> bool:
    return isinstance(result, Failed) and result.reason == reason


def size_problem(text: str) -> str | None:
    """Returns why an expression is too large, or None."""
    numbers = [match.group().lstrip("0") for match in _NUMBER.finditer(text)]
    if any(len(number) > MAX_DIGITS for number in numbers):
        return f"a number of more than {MAX_DIGITS} digits"
    exponent_product = 1
    for exponent in _EXPONENT.findall(text):
        value = int(exponent[:20])
        exponent_product *= value if value >= 100 else 1
        if value > MAX_EXPONENT or exponent_product > MAX_EXPONENT_PRODUCT:
            return f"a power of {value}"
    if _TOWER.search(text):
        return "a tower of powers"
    if _COUNTING_OPERATOR.search(text) and any(
        int(number or 0) > MAX_COUNTING_NUMBER for number in numbers
    ):
        return f"a factorial, sum or the like of more than {MAX_COUNTING_NUMBER}"
    return "nested too deeply" if nesting_depth(text) > MAX_DEPTH else None


def cached_results(pairs: Iterable[Pair]) -> Comparisons:
    """Returns the results of `pairs`, for `add_to_cache` in another process."""
    return {pair: _cache[pair] for pair in pairs if pair in _cache}


def add_to_cache(comparisons: Comparisons) -> None:
    """Adds comparisons to the cache."""
    for pair, result in comparisons.items():
        while len(_cache) >= _CACHE_SIZE:
            del _cache[next(iter(_cache))]
        _cache[pair] = result


def _compare_within_budget(pairs: Sequence[Pair], cpu_s: float) -> list[bool | Failed]:
    """Compares pairs and caches the results; skips the remaining pairs after MAX_CRASHES crashes."""
    results: list[bool | Failed] = []
    for start in range(0, len(pairs), 2 * MAX_PROCESSES):
        chunk = pairs[start : start + 2 * MAX_PROCESSES]
        if sum(_has_reason(result, "crash") for result in results) >= MAX_CRASHES:
            results += [_SKIPPED] * len(chunk)
        else:
            results += _compare_in_pool(chunk, cpu_s)
    add_to_cache(dict(zip(pairs, results, strict=True)))
    return results


def _compare_in_pool(pairs: Sequence[Pair], cpu_s: float) -> list[bool | Failed]:
    global _pool
    with _lock:
        if _pool is None:
            size = num_processes or min(usable_cores(), MAX_PROCESSES)
            _pool = DeadlinePool("hone.rewards.scores.symbolic_worker:make_verifier", {}, size)
        pool = _pool
    jobs = [{"answer": answer, "truth": truth, "cpu_s": cpu_s} for answer, truth in pairs]
    timeout = Failed("timeout", f"not equal after {cpu_s:g} s of CPU time")
    return [timeout if result is None else result for result in pool.run(jobs, WALL_LIMIT_S)]
