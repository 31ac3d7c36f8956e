"""Sets the number of CPU threads per process.

A matrix product on another number of threads differs in the last bits. Threads are not pinned to
cores.
"""

from __future__ import annotations

import os
import time

import torch

from hone.config.errors import ConfigError
from hone.cores import usable_cores

THREADS_ENV = "OMP_NUM_THREADS"
_MATRIX_SIZE, _REPEATS = 512, 10
"""Size of the matrix product in `slowdown`: large enough for several threads, 4 ms on one."""


def thread_count(local_world_size: int = 1) -> int:
    """Returns the threads per process: OMP_NUM_THREADS, or an equal share of the cores."""
    text = os.environ.get(THREADS_ENV, "")
    if not text:
        return max(1, usable_cores() // local_world_size)
    outermost = text.partition(",")[0].strip()  # OpenMP takes a list: one number per nested level
    if not outermost.isdigit() or int(outermost) < 1:
        raise ConfigError(f"{THREADS_ENV}={text!r}: give a whole number of threads, 1 or more")
    return int(outermost)


def load_average() -> float | None:
    """Returns the one-minute load average, or None if the system has none."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def fix_threads(count: int) -> None:
    """Uses exactly `count` threads for tensor operations in this process."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def slowdown(count: int) -> float:
    """Measures the time of a matrix product on `count` threads relative to one thread."""
    before = torch.get_num_threads()
    try:
        return _seconds(count) / _seconds(1)
    finally:
        fix_threads(before)


def _seconds(count: int) -> float:
    fix_threads(count)
    square = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE)
    square @ square  # starts the threads
    started = time.perf_counter()
    for _ in range(_REPEATS):
        square @ square
    return time.perf_counter() - started
