"""Balances sequences of different lengths over ranks, and splits them into micro-batches.

The caller synchronizes the number of micro-batches over the ranks and passes it as `at_least`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

import numpy as np

Partition = list[int]  # row numbers


def calculate_workload(lengths: Sequence[int] | np.ndarray) -> list[int]:
    """Returns the relative cost per row of L tokens: linear layers plus attention of a 7B model."""
    return [24576 * int(n) + int(n) ** 2 for n in lengths]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int] | np.ndarray, k_partitions: int, equal_size: bool
) -> list[Partition]:
    """Returns `k_partitions` non-empty, sorted lists of row numbers with nearly equal sums.

    Uses Karmarkar-Karp (largest differencing). With `equal_size` all have the same number of rows.
    """
    lengths = [int(n) for n in seqlen_list]
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
        next(part for part in partitions if not part).append(largest.pop())
    return [sorted(part) for part in partitions]


def _largest_differencing(lengths: list[int], k: int, equal_size: bool) -> list[Partition]:
    """Merges the two states with the largest spread until one is left (Karmarkar-Karp)."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    if equal_size:
        states = [
            [(lengths[row], [row]) for row in order[i : i + k]] for i in range(0, len(order), k)
        ]
    else:
        states = [[(0, [])] * (k - 1) + [(lengths[row], [row])] for row in order]
    tie_breaker = count()  # equal spreads merge in a fixed order
    heap = [(state[0][0] - state[-1][0], next(tie_breaker), state) for state in states]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (part[0], len(part[1])))
        heapq.heappush(heap, (merged[0][0] - merged[-1][0], next(tie_breaker), merged))
    return [rows for _, rows in heap[0][2]]


def micro_batches_by_tokens(
    lengths: Sequence[int] | np.ndarray,
    max_token_len: int,
    *,
    at_least: int = 1,
    multiple_of: int = 1,
) -> list[Partition]:
    """Returns the row numbers of micro-batches of at most `max_token_len` tokens each.

    The token counts are balanced, and the cheapest micro-batches come first and last, where a
    pipeline fills and drains. `at_least` is a minimum number of micro-batches.
    """
    sizes = [int(n) for n in lengths]
    if sizes and max(sizes) > max_token_len:
        raise ValueError(
            f"a sequence of {max(sizes)} tokens does not fit max_token_len={max_token_len}; "
            "raise the token budget (…_max_token_len_per_gpu) or shorten prompts and responses"
        )
    if not sizes:
        return []
    count = _round_up(max(at_least, -(-sum(sizes) // max_token_len), 1), multiple_of)
    parts = _fit_budget(sizes, max_token_len, count, multiple_of)
    return _order_small_large_small(parts, sizes)


def _fit_budget(sizes: list[int], budget: int, count: int, multiple_of: int) -> list[Partition]:
    def load(part: Partition) -> int:
        return sum(sizes[row] for row in part)

    def balanced(parts: int) -> list[Partition] | None:
        if parts > len(sizes):
            raise ValueError(
                f"{len(sizes)} sequences cannot form {parts} micro-batches (at_least, multiple_of)"
            )
        partitions = get_seqlen_balanced_partitions(sizes, parts, equal_size=False)
        return partitions if max(map(load, partitions)) <= budget else None

    if (parts := balanced(count)) is not None:
        return parts
    packed = _first_fit(sizes, budget)
    count = _round_up(max(count, len(packed)), multiple_of)
    if (parts := balanced(count)) is not None:
        return parts
    while len(packed) < count:  # first-fit never exceeds the budget
        fullest = max((part for part in packed if len(part) > 1), key=load)
        packed.remove(fullest)
        packed += [fullest[::2], fullest[1::2]]
    return packed


def _first_fit(sizes: list[int], budget: int) -> list[Partition]:
    bins: list[Partition] = []
    free: list[int] = []
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        index = next(
            (i for i, left in enumerate(free) if left >= sizes[row]),
            None,
        )
        if index is None:
            bins.append([row])
            free.append(budget - sizes[row])
        else:
            bins[index].append(row)
            free[index] -= sizes[row]
    return bins


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _order_small_large_small(parts: list[Partition], sizes: list[int]) -> list[Partition]:
    costs = calculate_workload(sizes)
    ordered = sorted((sorted(part) for part in parts), key=lambda p: (sum(costs[r] for r in p), p))
    return ordered[0::2] + ordered[1::2][::-1]


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Returns the inverse permutation of `idx_map`."""
    reverse = [0] * len(idx_map)
    for index, row in enumerate(idx_map):
        reverse[row] = index
    return reverse


def log_seqlen_unbalance(
    seqlen_list: Sequence[int] | np.ndarray, partitions: Sequence[Sequence[int]], prefix: str
) -> dict[str, float]:
    """Returns metrics of the tokens per rank, before and after balancing."""
    lengths = np.asarray(seqlen_list, dtype=np.int64)
    before = [int(part.sum()) for part in np.array_split(lengths, len(partitions))]
    after = [int(lengths[list(part)].sum()) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(after) / len(after),
    }
