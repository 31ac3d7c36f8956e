"""The order of rows: every epoch another permutation of one seed; a checkpoint resumes it exactly.

The rows that fill no batch at the end of an epoch are left out of it.
"""

from __future__ import annotations

import random

from hone.config import ConfigError
from hone.data.rows import DataError
from hone.types import Settings


def refuse_uneven(rows: int, ranks: int) -> None:
    """Each update is shared out evenly."""
    if rows % ranks:
        raise ConfigError(
            f"data.train_batch_size={rows} is not divisible by {ranks} data-parallel ranks; "
            f"use {rows // ranks * ranks or ranks} or {(rows // ranks + 1) * ranks}"
        )


def batches_in(rows: int, batch_rows: int) -> int:
    """Whole batches of an epoch; there must be one."""
    if rows < batch_rows:
        raise DataError(
            f"there are {rows} rows to train on, fewer than one batch of {batch_rows}; use "
            f"data.train_batch_size={rows} or less"
        )
    return rows // batch_rows


class RowOrder:
    """Endless batches of row numbers."""

    def __init__(self, rows: int, batch_rows: int, *, seed: int, shuffle: bool = True) -> None:
        self.batches_per_epoch = batches_in(rows, batch_rows)
        self.rows, self.batch_rows = rows, batch_rows
        self._seed, self._shuffle = seed, shuffle
        self.epoch = 0
        self.batch = 0
        self._following: list[int] | None = None  # the next epoch's, once it was looked at
        self._start()

    def next_batch(self) -> list[int]:
        numbers = self.peek()
        if self.batch == self.batches_per_epoch:
            assert self._following is not None
            self.epoch, self.batch = self.epoch + 1, 0
            self._order, self._following = self._following, None
        self.batch += 1
        return numbers

    def peek(self) -> list[int]:
        """What `next_batch` will hand out; the state stays as it is."""
        if self.batch < self.batches_per_epoch:
            first = self.batch * self.batch_rows
            return self._order[first : first + self.batch_rows]
        if self._following is None:
            self._following = self._next_order()
        return self._following[: self.batch_rows]

    def state_dict(self) -> dict[str, int | None]:
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "rows": self.rows,
            "batch_rows": self.batch_rows,
            "seed": self._seed if self._shuffle else None,
        }

    def load_state_dict(self, state: Settings) -> None:
        """Go on after the last batch handed out; another data set or order is an error."""
        now = self.state_dict()
        for name, meaning in (
            ("rows", "number of rows"),
            ("batch_rows", "data.train_batch_size"),
            ("seed", "data.seed (or data.shuffle)"),
        ):
            if state[name] != now[name]:
                raise DataError(
                    f"the checkpoint was made with {meaning} {state[name]}, this run has "
                    f"{now[name]}; restore it, or set another trainer.default_local_dir for a run of "
                    "its own (trainer.resume_mode=disable starts anew in this one)"
                )
        self._start()
        for _ in range(state["epoch"]):  # permutations follow each other: draw them again
            self._order = self._next_order()
        self.epoch, self.batch = state["epoch"], state["batch"]

    def _start(self) -> None:
        self.epoch, self.batch = 0, 0
        self._chooser = random.Random(self._seed)
        self._order = self._next_order()
        self._following = None

    def _next_order(self) -> list[int]:
        order = list(range(self.rows))
        if self._shuffle:
            self._chooser.shuffle(order)
        return order
