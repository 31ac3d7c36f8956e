"""One thread count for every controller, so that sums add up in the same order.

A matrix product split over another number of threads differs in the last bits. Leaves out pinning
threads to cores.
"""

from __future__ import annotations

import os

import torch

THREADS_ENV = "HONE_NUM_THREADS"


def thread_count(local_world_size: int = 1) -> int:
    """Threads of one worker: HONE_NUM_THREADS, OMP_NUM_THREADS, or its share of the cores."""
    for name in (THREADS_ENV, "OMP_NUM_THREADS"):
        text = os.environ.get(name, "")
        if text:
            if not text.isdigit() or int(text) < 1:
                raise ValueError(f"{name}={text!r}: give a whole number of threads, 1 or more")
            return int(text)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return max(1, cores // local_world_size)


def fix_threads(count: int) -> None:
    """Use exactly `count` threads for tensor operations in this process."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
