"""Measures how repetitive a text is: 0 without repeats, close to 1 for a text that only repeats.

This is PURE's measure: the sum of common prefixes of adjacent sorted suffixes, divided by its maximum
n(n+1)/2. It counts characters, not tokens.
"""

from __future__ import annotations

import numpy as np

MAX_CHARS = 100_000
"""Only the end of longer texts is measured, because loops occur there."""


def repeatness(text: str) -> float:
    """Returns 2 · Σ LCP(adjacent suffixes) / (n · (n + 1)); 0 for an empty text."""
    codes = np.frombuffer(text[-MAX_CHARS:].encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    n = len(codes)
    if n < 2:
        return 0.0
    ranks = _ranks_by_doubling(codes)
    order = np.argsort(ranks[-1], kind="stable")
    left, right = order[:-1].copy(), order[1:].copy()
    common = np.zeros(n - 1, dtype=np.int64)
    for level in range(len(ranks) - 1, -1, -1):
        width = 1 << level
        inside = np.maximum(left, right) + width <= n
        equal = np.zeros(n - 1, dtype=bool)
        equal[inside] = ranks[level][left[inside]] == ranks[level][right[inside]]
        step = equal * width
        left, right, common = left + step, right + step, common + step
    return float(2 * common.sum() / (n * (n + 1)))


def _ranks_by_doubling(codes: np.ndarray) -> list[np.ndarray]:
    """Returns `ranks`: `ranks[k][i]` orders the 2^k characters from i on, until all differ."""
    n = len(codes)
    ranks = [np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64)]
    width = 1
    while ranks[-1].max() < n - 1:
        current = ranks[-1]
        follow = np.full(n, -1, dtype=np.int64)  # the end of the text sorts first
        follow[: n - width] = current[width:] if width < n else current[:0]
        pairs = current * (n + 1) + follow + 1
        ranks.append(np.unique(pairs, return_inverse=True)[1].reshape(-1).astype(np.int64))
        width *= 2
    return ranks
