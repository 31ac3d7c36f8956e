"""The next batch's rows are encoded in threads while the model computes the current one.

Only a guess runs ahead: the order of rows is the trainer's, and a wrong guess is encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

EncodedRow = dict[str, list[int]]
THREADS = 4


class EncodedRows(Protocol):
    """Rows of `input_ids` and `loss_mask`, lists of one length."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> EncodedRow: ...


class RowsAhead:
    """Rows by number, with one batch on its way."""

    def __init__(self, rows: EncodedRows) -> None:
        self._rows = rows
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="encode rows")
        self._coming: tuple[tuple[int, ...], list[Future[EncodedRow]]] | None = None

    def take(self, numbers: Sequence[int]) -> list[EncodedRow]:
        """These rows; waits for those that are on their way. A row that cannot be encoded raises."""
        coming, self._coming = self._coming, None
        if coming is not None and coming[0] == tuple(numbers):
            return [row.result() for row in coming[1]]
        return [self._rows[number] for number in numbers]

    def expect(self, numbers: Sequence[int]) -> None:
        """Begin to encode what the next `take` will ask for."""
        self._coming = (
            tuple(numbers),
            [self._threads.submit(self._rows.__getitem__, number) for number in numbers],
        )
