"""The number of CPU threads of a process, so that sums add up in the same order under every controller.

A matrix product split over another number of threads differs in the last bits. Leaves out pinning
threads to cores.
"""

from __future__ import annotations

import os
import time

import torch

from hone.config.errors import ConfigError
from hone.cores import usable_cores

THREADS_ENV = "OMP_NUM_THREADS"
_SIDE, _REPEATS = 512, 10
"""The matrix product that `slowdown` times: long enough to be split, 4 ms on one thread."""


def thread_count(local_world_size: int = 1) -> int:
    """Threads of one process: OMP_NUM_THREADS, or its share of the cores."""
    text = os.environ.get(THREADS_ENV, "")
    if not text:
        return max(1, usable_cores() // local_world_size)
    outermost = text.partition(",")[0].strip()  # OpenMP takes a list: one number per nested level
    if not outermost.isdigit() or int(outermost) < 1:
        raise ConfigError(f"{THREADS_ENV}={text!r}: give a whole number of threads, 1 or more")
    return int(outermost)


def load_average() -> float | None:
    """Processes that ran or waited for a core in the last minute, on average; None where unknown."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def fix_threads(count: int) -> None:
    """Use exactly `count` threads for tensor operations in this process."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def slowdown(count: int) -> float:
    """Seconds of a matrix product on `count` threads over those on one, as the machine is now."""
    before = torch.get_num_threads()
    try:
        return _seconds(count) / _seconds(1)
    finally:
        fix_threads(before)


def _seconds(count: int) -> float:
    fix_threads(count)
    square = torch.ones(_SIDE, _SIDE)
    square @ square  # starts the threads
    started = time.perf_counter()
    for _ in range(_REPEATS):
        square @ square
    return time.perf_counter() - started
