"""Splits a mini-batch into micro-batches by a number of rows or by a token budget.

Rows stay in order, so the responses of a group stay together and share their prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class MicroBatchRule:
    """A micro-batch gets at most `rows` rows or, if `rows` is None, at most `tokens` tokens.

    A prompt that several rows of a micro-batch share is counted once.
    """

    rows: int | None
    tokens: int
    rows_per_unit: int = 1
    """Number of consecutive rows that stay in one micro-batch: 2 for the pairs of a reward model."""

    def split(
        self,
        lengths: Sequence[int],
        shared_lengths: Sequence[int] | None = None,
        *,
        min_parts: int = 1,
    ) -> list[list[int]]:
        """Returns the row indices of at least `min_parts` micro-batches; some may be empty.

        `shared_lengths` holds the number of tokens that each row shares with the previous row.
        """
        size = self.rows_per_unit
        shared_lengths = shared_lengths or [0] * len(lengths)
        if size > 1:  # split the units, then list their rows
            unit_starts = range(0, len(lengths), size)
            unshared_lengths = [n - s for n, s in zip(lengths, shared_lengths, strict=True)]
            max_units = None if self.rows is None else max(1, self.rows // size)
            unit_lengths = [
                lengths[i] + sum(unshared_lengths[i + 1 : i + size]) for i in unit_starts
            ]
            parts = MicroBatchRule(max_units, self.tokens).split(unit_lengths, min_parts=min_parts)
            return [[i * size + k for i in part for k in range(size)] for part in parts]
        if self.rows is not None:
            parts = [
                list(range(i, min(i + self.rows, len(lengths))))
                for i in range(0, len(lengths), self.rows)
            ]
        else:
            parts = self._split_by_tokens(lengths, shared_lengths)
        while len(parts) < min_parts:
            _halve_largest(parts)
        return parts

    def _split_by_tokens(
        self, lengths: Sequence[int], shared_lengths: Sequence[int]
    ) -> list[list[int]]:
        parts: list[list[int]] = []
        tokens_left = 0
        for row, (length, shared) in enumerate(zip(lengths, shared_lengths, strict=True)):
            if length > self.tokens:
                raise ValueError(
                    f"a row has {length} tokens, more than the budget of {self.tokens} for one forward; "
                    f"set ppo_max_token_len_per_gpu to at least {length}"
                )
            if parts and length - shared <= tokens_left:
                tokens_left -= length - shared
            else:
                parts.append([])
                tokens_left = self.tokens - length
            parts[-1].append(row)
        return parts


def _halve_largest(parts: list[list[int]]) -> None:
    index = max(range(len(parts)), key=lambda i: len(parts[i])) if parts else 0
    largest = parts[index] if parts else []
    middle = (len(largest) + 1) // 2
    parts[index : index + 1] = [largest[:middle], largest[middle:]]
