"""How much of a bare subprocess's speed is left when the program runs in the box.

MBPP-style checks (a small function and its asserts) on the same interpreter, bare and boxed, in
alternating rounds so that other load on the machine meets both. The bare side isolates nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hone.sandbox import run_python
from hone.sandbox.interpreter import SYSTEM_PYTHON, describe

WANTED_RATIO = 0.5
ROUNDS, CHECKS_PER_ROUND = 9, 60

CHECKS = (
    "def shared(a, b):\n    return sorted(set(a) & set(b))\n\n"
    "assert shared([3, 4, 5, 6], [5, 7, 4, 10]) == [4, 5]\nassert shared([1], [2]) == []\n",
    "def is_prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))\n\n"
    "assert is_prime(13)\nassert not is_prime(91)\nassert not is_prime(1)\n",
    "import heapq\n\ndef largest(values, k):\n    return heapq.nlargest(k, values)\n\n"
    "assert largest([26, 35, 22, 85, 14], 3) == [85, 35, 26]\nassert largest([], 2) == []\n",
    "import re\n\ndef words_of(text, n):\n    return re.findall(rf'\\b\\w{{{n}}}\\b', text)\n\n"
    "assert words_of('a cat and an apple', 3) == ['cat', 'and']\n",
    "def cost(grid):\n    best = [0] + [10**9] * (len(grid[0]) - 1)\n    for row in grid:\n"
    "        for i, value in enumerate(row):\n"
    "            best[i] = value + min(best[i], best[i - 1] if i else 10**9)\n    return best[-1]\n\n"
    "assert cost([[1, 2, 3], [4, 8, 2], [1, 5, 3]]) == 11\n",
)


def bare(python: str, paths: list[Path], number: int) -> None:
    """One check as one would run it without any protection."""
    command = [python, str(paths[number % len(paths)])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def boxed(python: str, number: int) -> None:
    result = run_python(CHECKS[number % len(CHECKS)], timeout_s=60.0, interpreter=python)
    assert result.ok, result


def seconds(check: Callable[[int], None], concurrent: int) -> float:
    with ThreadPoolExecutor(concurrent) as pool:
        started = time.perf_counter()
        list(pool.map(check, range(CHECKS_PER_ROUND)))
        return time.perf_counter() - started


def compare(python: str, concurrent: int) -> dict[str, float]:
    """Checks a second on either side, and the median over rounds of their ratio."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"check_{i}.py") for i in range(len(CHECKS))]
        for path, code in zip(paths, CHECKS, strict=True):
            path.write_text(code)
        rounds = []
        for i in range(ROUNDS + 1):
            plain = seconds(lambda n: bare(python, paths, n), concurrent)
            inside = seconds(lambda n: boxed(python, n), concurrent)
            if i:  # the first round warms caches and starts the warden
                rounds.append((plain, inside))
    return {
        "bare_per_s": CHECKS_PER_ROUND / statistics.median(plain for plain, _ in rounds),
        "boxed_per_s": CHECKS_PER_ROUND / statistics.median(inside for _, inside in rounds),
        "ratio": statistics.median(plain / inside for plain, inside in rounds),
    }


def main() -> dict[str, Any]:
    """Print both rates and their ratio, one at a time and with all cores busy; return the numbers."""
    # The system's Python where there is one: packages that start-up hooks load would slow the
    # bare side alone, since the box hides them.
    python = SYSTEM_PYTHON if os.path.exists(SYSTEM_PYTHON) else describe().executable
    many = 2 * (os.cpu_count() or 1)
    results = {"one_at_a_time": compare(python, 1), "all_cores_busy": compare(python, many)}
    for name, row in results.items():
        print(
            f"{name.replace('_', ' '):15} bare {row['bare_per_s']:6.1f}/s, boxed"
            f" {row['boxed_per_s']:6.1f}/s, ratio {row['ratio']:.2f}"
        )
    ratio = results["all_cores_busy"]["ratio"]
    print(f"Throughput in the box: {ratio:.2f}× a bare subprocess (wanted {WANTED_RATIO}×)")
    return {**results, "ratio": ratio}


if __name__ == "__main__":
    main()
