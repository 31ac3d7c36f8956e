"""Balances sequences of different lengths over ranks."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

Partition = list[int]
"""The row numbers of one part."""
_LINEAR_COST = 6 * 4096
"""The cost per token of the linear layers of a 7B model (width 4096); attention to one token costs 1."""


def calculate_workload(lengths: Sequence[int] | np.ndarray) -> list[int]:
    """Returns the relative cost of each row: linear layers plus attention of a 7B model."""
    return [_LINEAR_COST * int(length) + int(length) ** 2 for length in lengths]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int] | np.ndarray, k_partitions: int, equal_size: bool
) -> list[Partition]:
    """Returns `k_partitions` non-empty, sorted lists of row numbers with nearly equal sums.

    Uses Karmarkar-Karp (largest differencing). With `equal_size`, all lists have the same length.
    """
    lengths = [int(length) for length in seqlen_list]
    if not 1 <= k_partitions <= len(lengths):
        raise ValueError(
            f"{len(lengths)} sequences cannot be split into {k_partitions} partitions; "
            f"use 1 to {len(lengths)}"
        )
    if equal_size and len(lengths) % k_partitions:
        raise ValueError(
            f"{len(lengths)} sequences do not divide evenly over {k_partitions} partitions; "
            f"use equal_size=False or a multiple of {k_partitions}"
        )
    partitions = _largest_differencing(lengths, k_partitions, equal_size)
    while not all(partitions):  # only rows of length 0 can leave a partition without rows
        largest = max(partitions, key=len)
        largest.sort(key=lambda row: -lengths[row])
        partitions[partitions.index([])].append(largest.pop())
    return [sorted(part) for part in partitions]


def _largest_differencing(
    lengths: list[int], num_partitions: int, equal_size: bool
) -> list[Partition]:
    """Merges the two states with the largest spread until one is left (Karmarkar-Karp).

    A state is a list of one pair per partition: a sum of lengths, and the rows that have this sum.
    """
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    if equal_size:
        states = [
            [(lengths[row], [row]) for row in order[start : start + num_partitions]]
            for start in range(0, len(order), num_partitions)
        ]
    else:
        empty_pairs: list[tuple[int, Partition]] = [(0, [])] * (num_partitions - 1)
        states = [[*empty_pairs, (lengths[row], [row])] for row in order]
    tie_breaker = itertools.count()  # equal spreads merge in a fixed order
    heap = [(state[0][0] - state[-1][0], next(tie_breaker), state) for state in states]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        # The largest sums of one state join the smallest sums of the other.
        state = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        state.sort(key=lambda part: (part[0], len(part[1])))
        heapq.heappush(heap, (state[0][0] - state[-1][0], next(tie_breaker), state))
    return [rows for _, rows in heap[0][2]]
