"""PURE's measure of repetition: from 0 for a text without repeats to almost 1 for one repeated character."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_CHARS = 100_000  # only the end of a longer text is measured, because loops occur at the end
PAIRWISE_CHARS = 512
"""Up to this length, all pairs of positions are compared, because sorting would be slower."""
PAIRWISE_TEXTS = 128  # number of short texts that are measured together


def repeatness(texts: Sequence[str]) -> list[float]:
    """Returns 2 · Σ LCP(adjacent suffixes) / (n · (n + 1)) for each text of n characters (0 if n = 0).

    LCP is the length of the longest common prefix; suffixes are adjacent in alphabetical order.
    """
    sorted_texts = sorted({text[-MAX_CHARS:] for text in texts}, key=len)
    short_texts = [text for text in sorted_texts if len(text) <= PAIRWISE_CHARS]
    lcp_sums: dict[str, int] = {}
    for start in range(0, len(short_texts), PAIRWISE_TEXTS):
        batch = short_texts[start : start + PAIRWISE_TEXTS]
        lcp_sums |= zip(batch, _lcp_sums_pairwise(batch), strict=True)
    for text in sorted_texts[len(short_texts) :]:
        lcp_sums[text] = _lcp_sum_by_sorting(_codes(text))
    tails = [text[-MAX_CHARS:] for text in texts]
    return [2 * lcp_sums[text] / (len(text) * (len(text) + 1)) if text else 0.0 for text in tails]


def _codes(text: str) -> np.ndarray:
    """Returns the code points of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def _lcp_sums_pairwise(texts: Sequence[str]) -> list[int]:
    """Returns Σ LCP(adjacent suffixes) of each text, which equals Σ_i max_{j < i} LCP(suffix i, suffix j)."""
    max_length = max(map(len, texts))
    codes = np.full((max_length, len(texts)), np.nan, dtype=np.float32)  # NaN equals no character
    for index, text in enumerate(texts):
        codes[: len(text), index] = _codes(text)
    lcp = np.zeros(codes.shape, dtype=np.int16)  # row j: LCP of suffixes i and j
    lcp_sums = np.zeros(len(texts), dtype=np.int64)
    for i in range(max_length - 1, 0, -1):
        lcp[:i] = (lcp[1 : i + 1] + 1) * (codes[:i] == codes[i])
        lcp_sums += lcp[:i].max(0)
    return [int(lcp_sum) for lcp_sum in lcp_sums]


def _lcp_sum_by_sorting(codes: np.ndarray) -> int:
    """Returns Σ LCP(adjacent suffixes) by sorting the suffixes."""
    n = len(codes)
    ranks = _ranks_by_doubling(codes)
    order = np.argsort(ranks[-1], kind="stable")
    left, right = order[:-1].copy(), order[1:].copy()
    lcp = np.zeros(n - 1, dtype=np.int64)
    for level in range(len(ranks) - 1, -1, -1):
        width = 1 << level
        is_inside = np.maximum(left, right) + width <= n
        is_equal = np.zeros(n - 1, dtype=bool)
        is_equal[is_inside] = ranks[level][left[is_inside]] == ranks[level][right[is_inside]]
        advance = is_equal * width
        left, right, lcp = left + advance, right + advance, lcp + advance
    return int(lcp.sum())


def _ranks_by_doubling(codes: np.ndarray) -> list[np.ndarray]:
    """Returns `ranks`: `ranks[k][i]` is the rank of the 2^k characters from position i."""
    n = len(codes)
    ranks = [np.unique(codes, return_inverse=True)[1].reshape(-1).astype(np.int64)]
    width = 1
    while ranks[-1].max() < n - 1:
        last_ranks = ranks[-1]
        next_ranks = np.full(n, -1, dtype=np.int64)  # the end of the text sorts first
        next_ranks[: n - width] = last_ranks[width:] if width < n else last_ranks[:0]
        pairs = last_ranks * (n + 1) + next_ranks + 1
        ranks.append(np.unique(pairs, return_inverse=True)[1].reshape(-1).astype(np.int64))
        width *= 2
    return ranks
