"""Sets the number of CPU threads per process.

The number of threads changes the last bits of a matrix product. Threads are not pinned to cores.
"""

from __future__ import annotations

import os
import time

import torch

from hone.config.errors import ConfigError
from hone.cores import usable_cores

THREADS_ENV = "OMP_NUM_THREADS"
_MATRIX_SIZE, _REPEATS = 512, 10
"""The matrix products that `slowdown` measures: large enough for several threads, 4 ms on one."""


def thread_count(local_world_size: int = 1) -> int:
    """Returns the number of threads per process: OMP_NUM_THREADS, or an equal share of the cores."""
    text = os.environ.get(THREADS_ENV, "")
    if not text:
        return max(1, usable_cores() // local_world_size)
    outermost = text.partition(",")[0].strip()  # OpenMP takes a list: one number per nested level
    if not outermost.isdigit() or int(outermost) < 1:
        raise ConfigError(f"{THREADS_ENV}={text!r}: give a whole number of threads, 1 or more")
    return int(outermost)


def load_average() -> float | None:
    """Returns the one-minute load average, or None if the system does not measure it."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def set_thread_count(count: int) -> None:
    """Sets the number of threads of tensor operations in this process."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def slowdown(count: int) -> float:
    """Measures the time of a matrix product on `count` threads relative to one thread."""
    previous_count = torch.get_num_threads()
    try:
        return _matmul_seconds(count) / _matmul_seconds(1)
    finally:
        set_thread_count(previous_count)


def _matmul_seconds(count: int) -> float:
    set_thread_count(count)
    matrix = torch.ones(_MATRIX_SIZE, _MATRIX_SIZE)
    matrix @ matrix  # starts the threads
    start_time = time.perf_counter()
    for _ in range(_REPEATS):
        matrix @ matrix
    return time.perf_counter() - start_time
