"""Are two LaTeX answers equal as mathematics? By math-verify, in a process that can be killed.

Only its LaTeX reader is used: the plain-expression one ends in Python's `eval`. An expression that
exceeds the time or memory limit counts as not equal, and as a mishap that the manager reports.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable
from functools import lru_cache

from hone.rewards import failures
from hone.rewards.failures import Failed
from hone.rewards.pool import DeadlinePool

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 5.0
MEMORY_LIMIT_MB = 2048
MAX_CHARS = 1000
_CACHE_SIZE = 8192

_lock = threading.Lock()
_pool: DeadlinePool | None = None
_cache: dict[tuple[str, str], bool | Failed] = {}


def symbolically_equal(answer: str, truth: str) -> bool:
    """Whether math-verify takes `answer` for `truth`; False when it is not installed or is late."""
    if not available() or max(len(answer), len(truth)) > MAX_CHARS:
        return False
    key = (answer, truth)
    if key not in _cache:
        if len(_cache) >= _CACHE_SIZE:
            _cache.clear()
        # A group often gives one answer many times; a late one must not cost its limit each time.
        _cache[key] = _ask(answer, truth)
    result = _cache[key]
    if isinstance(result, Failed):
        failures.events[f"symbolic_{result.reason}"] += 1
        return False
    return result


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether math-verify is installed; says so once when it is not."""
    if importlib.util.find_spec("math_verify") is not None:
        return True
    logger.warning(
        "math-verify is not installed: mathematical answers are compared as normalised text and "
        "numbers only. Install it with: pip install 'hone-rl[math]'"
    )
    return False


def _ask(answer: str, truth: str) -> bool | Failed:
    global _pool
    with _lock:
        if _pool is None:
            _pool = DeadlinePool("hone.rewards.scores.symbolic:make_verifier", {}, size=1)
        pool = _pool
    result: bool | Failed = pool.run([{"answer": answer, "truth": truth}], TIME_LIMIT_S)[0]
    return result


def make_verifier() -> Callable[..., bool]:
    """In the other process: limit memory, load math-verify, return the comparison."""
    import resource

    from math_verify import LatexExtractionConfig, parse, verify

    limit = MEMORY_LIMIT_MB << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    latex = [LatexExtractionConfig()]

    def read(text: str) -> list[object]:
        parsed: list[object] = parse(
            rf"\boxed{{{text}}}", extraction_config=latex, parsing_timeout=None
        )
        return parsed

    def equal(answer: str, truth: str) -> bool:
        return bool(verify(read(truth), read(answer), timeout_seconds=None))

    return equal
